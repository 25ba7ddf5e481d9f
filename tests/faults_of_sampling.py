"""Faults of sampling: the noise, filters, what is drawn from, drafts, the operator, ranks of logits, the report."""

from fault import of

NOISE, REFERENCE = "ops/sampling/noise.py", "ops/sampling/reference.py"
DRAW, KEPT, WIDE = "ops/sampling/kernels/common.py", "ops/sampling/kernels/kept.py", "ops/sampling/kernels/wide.py"
ROW, ABOVE = "ops/sampling/kernels/row.py", "ops/sampling/kernels/above.py"
RANKED = "ops/sampling/kernels/ranked.py"
AGAIN = "test_sample_kernels.py::test_a_boundary_among_twice_as_many_lanes_takes_a_second_look"
PARTS = "test_sample_kernels.py::test_what_a_rows_maximum_decides_is_drawn_in_parts"
FILTERS, BELOW = "test_sample_kernels.py::test_filters", "test_sample_kernels.py::test_boundaries_below_what_is_held"
CALL, RULES = "ops/sampling/sample.py", "ops/sampling/operators.py"
SHARDED, TURNS = "ops/sampling/over_ranks.py", "ops/sampling/turns.py"
TURN = "test_sampling_turns.py::test_draws_are_those_of_one_turn"
REPORT, REPORTS = "ops/sampling/kernels/report.py", "ops/sampling/calls.py"
REPORTED = "test_sample_kernels.py::test_log_probabilities_of_tokens_and_of_the_greatest"
HIDDEN = "test_sample_kernels.py::test_the_logits_as_given_have_what_a_bitmask_hides"
BESIDE = "test_sample_kernels.py::test_log_probabilities_with_bias_bitmask_and_rows"
MET = "test_sampling_boundaries.py::test_a_sum_that_is_top_p_but_for_float32_has_reached_it"
SHARE = "test_sampling_boundaries.py::test_a_share_that_is_min_p_but_for_float32_is_kept"
MIN_P = "test_sampling_boundaries.py::test_min_p_of_kernels_is_exact_to_2_to_the_minus_20"
ONE_SEED = "test_sampling.py::test_rows_of_one_seed_that_is_a_number_are_independent"
GREEDY = "test_sampling.py::test_temperature_0_takes_the_first_of_the_greatest"
SAMPLING = (
    of(
        "ops", "a-nan-that-is-not-the-greatest", DRAW,
        "a, b = tl.split(tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL).reshape(L, 2, 2))",
        "a, b = tl.split(tl.maximum(a, b).reshape(L, 2, 2))", GREEDY,
    ),
    of(
        "ops", "nan-seen-and-forgotten", "ops/sampling/kernels/plain.py", "odd = tl.where(score == score, odd, 1.0)",
        "odd = odd",
        GREEDY,
    ),
    of(
        "ops", "greedy-where-rows-may-be", "ops/sampling/launches.py",
        "greedy=not filtered and not isinstance(temperature, Tensor) and temperature == 0", "greedy=not filtered",
        "test_sample_kernels.py::test_some_rows_have_temperature_0",
    ),
    of(
        "ops", "noise-of-32-bits", NOISE, "low * 2.0**-64", "2.0**-33",
        "test_sampling_noise.py::test_noise_is_relative_to_itself_where_it_is_small_and_finite_where_it_is_large",
    ),
    of(
        "ops", "noise-that-may-be-infinite", NOISE, ".clamp(max=_MOST)", ".clamp(max=1.0)",
        "test_sampling_noise.py::test_noise_is_relative_to_itself_where_it_is_small_and_finite_where_it_is_large",
    ),
    of(
        "ops", "position-of-32-bits", NOISE, "(position >> 32) & _MASK", "position * 0",
        "test_sampling.py::test_seeds_and_positions_are_64_bits",
    ),
    of(
        "ops", "member-by-the-noise-of-its-group", NOISE, "words_at(seed, position, cols, members)",
        "words_at(seed, position, group.expand_as(cols), groups)",
        "test_sampling.py::test_columns_are_drawn_as_often_as_they_are_likely",
    ),
    of(
        "ops", "last-of-equals-at-a-boundary", REFERENCE,
        "order = x.sort(dim=1, descending=True, stable=True).indices",
        "order = x.flip(1).sort(dim=1, descending=True, stable=True).indices.neg() + x.shape[1] - 1",
        "test_sampling.py::test_top_k_of_one_is_argmax_at_ties",
    ),
    of(
        "ops", "column-of-the-boundary-left-out", REFERENCE, "before < p * REACHED * running",
        "running < p * REACHED * running",
        "test_sampling.py::test_kept_columns_are_those_of_a_stable_sort",
    ),
    of(
        "ops", "top-p-of-all-columns", REFERENCE, "weights if joint else torch.where(in_k, weights, 0.0)", "weights",
        "test_sampling.py::test_kept_columns_are_those_of_a_stable_sort",
    ),
    of(
        "ops", "sums-rounded-to-32-bits", REFERENCE, "low.sum(-1, keepdim=True).double() / scale) / scale",
        "low.sum(-1, keepdim=True).double() / scale).float().double() / scale",
        "test_sampling_filters.py::test_probabilities_are_renormalised",
    ),
    of(
        "ops", "two-inf-drawn-from", REFERENCE,
        "(m > -math.inf) & ((x == math.inf).sum(1, keepdim=True) <= 1)", "(m > -math.inf)",
        "test_sampling_options.py::test_rows_that_cannot_be_drawn_from",
    ),
    of(
        "ops", "replaced-by-the-targets-distribution", REFERENCE, "left = (p - q).clamp(min=0.0)", "left = p",
        "test_sampling_speculative.py::test_tokens_have_the_distribution_of_the_target",
    ),
    of(
        "ops", "replaced-by-the-noise-of-the-draft", REFERENCE, "noise.RESIDUAL_GROUPS, noise.RESIDUAL_MEMBERS",
        "noise.GROUPS, noise.MEMBERS",
        "test_sampling_speculative.py::test_what_replaces_a_draft_does_not_depend_on_its_noise",
    ),
    of(
        "ops", "no-row-given-to-a-kernel", "ops/sampling/one_device.py", "if not n_draws or not logits.shape[0]:",
        "if False:",
        "test_library_sampling.py::test_draws_of_no_row_and_rows_without_a_draw",
    ),
    of(
        "ops", "composed-where-it-is-traced", CALL, "if route is Route.OPERATOR:", "if False:",
        "test_library_sampling.py::test_compiled_code_holds_one_operator",
    ),
    of(
        "register", "draws-faked-as-rows", RULES,
        "logits.shape[0] if options.row_indices is None else options.row_indices.shape[0]", "logits.shape[0] + 0",
        "test_operators.py::test_what_runs_and_its_fake_agree",
    ),
    of(
        "kernels", "last-column-of-equals-kept", DRAW, "tl.where(cols <= B.col, B.x, B.above)", "B.x", FILTERS,
    ),
    of("kernels", "min-p-by-a-rough-logarithm", DRAW, "(p * tl.exp2(-z) - 1.0) * LOG2E", "0.00001", MIN_P),
    of("kernels", "temperature-of-1-for-min-p", DRAW, "+ log_p * D.temperature", "+ log_p", MIN_P),
    of("kernels", "top-p-by-the-last-bit", DRAW, "p = tl.where(p < 1, p * REACHED, p)", "p = p", MET),
    of(
        "kernels", "min-p-by-the-last-bit", DRAW, "tl.maximum(least_p, 1e-37) * REACHED", "tl.maximum(least_p, 1e-37)",
        SHARE,
    ),
    of(
        "ops", "numbers-as-float32", REFERENCE,
        "return torch.full((1, 1), number, dtype=torch.float64, device=x.device)", "return per_row(number, x)",
        "test_sampling_boundaries.py::test_the_reference_is_exact_but_for_what_logits_lose",
    ),
    of(
        "ops", "top-p-of-the-reference-by-the-last-bit", REFERENCE, "before < p * REACHED * running",
        "before < p * running", MET,
    ),
    of(
        "ops", "min-p-of-the-reference-by-the-last-bit", REFERENCE, "double_of(min_p, x).clamp(0, 1) * REACHED)",
        "double_of(min_p, x).clamp(0, 1))", SHARE,
    ),
    of(
        "ops", "rows-of-one-seed-at-position-0", "ops/sampling/one_device.py",
        "return 0 if isinstance(seed, Tensor) else None", "return 0",
        ONE_SEED,
    ),
    of(
        "ops", "rows-of-one-seed-at-position-0-once-kept", "ops/sampling/one_device.py",
        '(None, None) if seed.__class__ is int else (0, "number")', '(0, "number")', ONE_SEED,
    ),
    of(
        "ops", "rows-of-one-seed-numbered-by-each-rank", SHARDED, "position = torch.arange(n_draws, device=x.device)",
        "position = None", "test_shards_sampling.py::test_rows_of_one_seed_are_numbered_over_all_ranks",
    ),
    of(
        "ops", "sequences-that-share-positions", CALL, "positions = positions * k_and_1", "positions = positions",
        "test_sampling_speculative.py::test_sequences_of_one_seed_that_is_a_number_share_no_noise",
    ),
    of(
        "ops", "tokens-over-what-is-still-read", "ops/sampling/one_device.py",
        "if overlaps(out, logits, *numbers, bias, bitmask, rows):", "if False:",
        "test_sampling_options.py::test_out_may_share_memory_with_an_argument",
    ),
    of(
        "ops", "tokens-that-autograd-does-not-see", "ops/sampling/one_device.py",
        "            _bump_version((out,))", "            pass",
        "test_sampling_options.py::test_autograd_is_told_of_tokens_written_to_out",
    ),
    of(
        "ops", "tokens-that-share-one-place", "ops/sampling/options.py", "if any(stride == 0 and size > 1 for",
        "if any(stride < 0 and size > 1 for", "test_sampling_options.py::test_an_expanded_out_is_refused",
    ),
    of(
        "ops", "masks-without-a-gradient", REFERENCE, "return logits.masked_fill(~(kept | bad), -math.inf)",
        "return logits.detach().masked_fill(~(kept | bad), -math.inf)",
        "test_sampling_gradients.py::test_masks_pass_the_gradient_of_what_they_keep",
    ),
    of(
        "ops", "a-sum-without-a-gradient", REFERENCE, "return total + (differentiable - differentiable.detach())",
        "return total",
        "test_sampling_gradients.py::test_renormalised_probabilities_are_differentiated_through_their_sum",
    ),
    of(
        "ops", "gradients-of-rows-that-are-nan", REFERENCE, "-math.inf) * nan_where(bad, logits.dtype)",
        "-math.inf).masked_fill(bad, math.nan)",
        "test_sampling_gradients.py::test_rows_that_are_nan_have_gradients_of_nan_and_no_other_row_has",
    ),
    of(
        "ops", "infinity-times-a-gradient-of-0", REFERENCE, "scaled = present & x.isfinite()", "scaled = present",
        "test_sampling_gradients.py::test_what_is_hidden_leaves_a_penalty_its_gradient",
    ),
    of(
        "ops", "log-probabilities-without-a-gradient", CALL,
        "if return_logprobs is not None and _differentiates(logits, temperature, logit_bias):", "if False:",
        "test_sampling_gradients.py::test_log_probabilities_of_draws_have_gradients",
    ),
    of(
        "ops", "gradients-without-a-temperature", REFERENCE, "/ torch.where(there & (t > 0), t, 1.0)",
        "/ torch.where(there & (t > 0), t.detach(), 1.0)",
        "test_sampling_gradients.py::test_log_probabilities_of_draws_have_gradients",
    ),
    of(
        "ops", "gradients-of-shards-dropped", CALL,
        "return _refusing_gradients(of_shards, logits, temperature, logit_bias)", "return of_shards",
        "test_shards_sampling.py::test_log_probabilities_of_shards_are_read_and_raise_in_a_backward_pass",
    ),
    of(
        "kernels", "candidates-of-one-quarter-left-out", KEPT,
        "    list_candidates(list_ptr, H.x_3, column_of(H.call, 3), base + n_0 + n_1 + n_2, known, cut)\n", "", FILTERS,
    ),
    of(
        "kernels", "top-p-of-all-after-top-k", WIDE,
        "            target = F.p.to(tl.float64) * (mass + kept).to(tl.float64)\n", "            target = target\n",
        BELOW,
    ),
    of(
        "kernels", "mass-above-the-list-forgotten", WIDE, "        tl.atomic_add(record_ptr + MASS,",
        "        tl.atomic_max(record_ptr + MASS,", BELOW,
    ),
    of(
        "kernels", "columns-listed-from-the-next-quarter", WIDE, "bit // 8 * QUARTER", "(bit // 8 + 1) % 4 * QUARTER",
        BELOW,
    ),
    of(
        "kernels", "last-part-draws-alone", ROW,
        "        key = tl.atomic_max(record_ptr + KEY, 0, sem=\"relaxed\")\n", "", BELOW,
    ),
    of("kernels", "lanes-of-the-first-part", ABOVE, "(not most), stretch)", "(not most), 0)", PARTS),
    of("kernels", "all-lanes-of-the-first-part", ABOVE, "stretch * LANES + i, lane)", "i, lane)", PARTS),
    of("kernels", "one-round-of-lanes", ABOVE, "for start in range(0, n, L):", "for start in range(0, L, L):", PARTS),
    of(
        "kernels", "parts-that-begin-with-anything", KEPT, "            begin_parts(scratch_ptr + draw * K.scratch)",
        "            pass", PARTS,
    ),
    of(
        "ops", "inf-in-two-shards", SHARDED, "(n_inf.sum(0) <= 1)", "(n_inf.amax(0) <= 1)",
        "test_shards_sampling.py::test_rows_that_cannot_be_drawn_from_and_rows_of_one_column",
    ),
    of(
        "ops", "positions-that-begin-anew-each-turn", TURNS, "torch.arange(here.start, here.stop,",
        "torch.arange(0, here.stop - here.start,",
        "test_sampling_turns.py::test_a_generators_draws_are_those_of_one_turn",
    ),
    of(
        "ops", "numbers-of-the-first-turn", TURNS, "own = [each[here] if",
        "own = [each[: here.stop - here.start] if", TURN,
    ),
    of(
        "ops", "bitmask-of-the-first-turn", TURNS, "bitmask[here], None if",
        "bitmask[: here.stop - here.start], None if", TURN,
    ),
    of(
        "ops", "header-of-other-rows", "ranks/groups.py", "shards.n_classes, rows, shards.digest,",
        "shards.n_classes, shards.digest,",
        "test_shards_misuse.py::test_what_a_message_says_of_its_rank_is_made_once_for_messages_of_one_kind",
    ),
    of(
        "kernels", "mass-above-the-cut-forgotten", KEPT, "return count.to(tl.int64), mass",
        "return count.to(tl.int64), mass * 0", AGAIN,
    ),
    of("kernels", "the-cut-is-listed-again", KEPT, "between & (order < cut)", "between & (order <= cut)", AGAIN),
    of("kernels", "ranks-from-below", RANKED, "other[None, :] > code", "other[None, :] < code", FILTERS),
    of("kernels", "above-itself", RANKED, "other[None, :] > code", "other[None, :] >= code", FILTERS),
    of(
        "kernels", "compared-with-whole-rounds-alone", RANKED, "for start in range(0, n, 4 * AT_ONCE):",
        "for start in range(0, n - AT_ONCE, 4 * AT_ONCE):", FILTERS,
    ),
    of("kernels", "rounds-that-overlap", RANKED, "j = start + turn * AT_ONCE +", "j = start + turn +", FILTERS),
    of("kernels", "one-more-than-k", RANKED, "((count + i < F.k)", "((count + i <= F.k)", FILTERS),
    of(
        "kernels", "codes-left-unsorted", RANKED, "tl.store(list_ptr + tl.sum(above, axis=1)",
        "tl.store(list_ptr + i", FILTERS,
    ),
    of(
        "kernels", "boundary-of-top-p-left-out", RANKED, "((through - weight).to(tl.float64) < target)",
        "(through.to(tl.float64) < target)", FILTERS,
    ),
    of(
        "kernels", "top-p-of-all-after-ranks", RANKED,
        "tl.where(F.k > 0, mass + tl.sum(tl.where(kept, weight, 0), axis=0), F.total)", "F.total", FILTERS,
    ),
    of(
        "kernels", "joint-of-what-top-k-keeps", RANKED, "    if K.joint:\n        of_target",
        "    if False:\n        of_target", FILTERS,
    ),
    of(
        "kernels", "greatest-that-is-kept", RANKED, "tl.min(tl.where(kept, code, NOWHERE), axis=0)",
        "tl.max(tl.where(kept, code, nothing_listed()), axis=0)", FILTERS,
    ),
    of(
        "kernels", "top-p-of-what-is-listed", KEPT, "by_k & (by_p | (F.p >= 1)), by_p)", "by_k | by_p, by_p)", FILTERS,
    ),
    of("kernels", "log-of-a-sum-added", REPORT, "offset = -tl.log(total", "offset = tl.log(total", REPORTED),
    of("kernels", "any-inf-is-likely", REPORT, "(n_nan == 0) & (n_inf == 1), 0.0", "n_nan == 0, 0.0", HIDDEN),
    of(
        "kernels", "inf-less-inf", REPORT, "tl.where(x_t == origin, offset, x_t - origin + offset)",
        "x_t - origin + offset", REPORTED,
    ),
    of("kernels", "scores-in-log-2", REPORT, "x_t, D.factor * LN2,", "x_t, D.factor,", REPORTED),
    of("kernels", "greatest-of-too-few-lanes", REPORT, "if (n < F.k) & (known > LOWEST):", "if False:", REPORTED),
    of(
        "kernels", "count-of-another-list", REPORT, "    tl.store(record_ptr + LISTED, tl.zeros([], tl.int64))\n", "",
        "test_sample_kernels.py::test_memory_that_is_new_holds_anything",
    ),
    of("kernels", "quarters-that-overlap", REPORT, "<< (quarter * 8)", "<< (quarter * 4)", REPORTED),
    of(
        "kernels", "list-without-its-bias", WIDE, "x += tl.load(D.bias_ptr + col,",
        "x += 0.0 * tl.load(D.bias_ptr + col,", BESIDE,
    ),
    of(
        "kernels", "a-place-after-the-last-unwritten", REPORT, "(i >= tl.minimum(n, top_k))",
        "(i > tl.minimum(n, top_k))",
        "test_sample_kernels.py::test_memory_that_is_new_holds_anything",
    ),
    of("kernels", "columns-that-no-filter-kept", REPORT, "tl.where(value > NEG_INF, col, -1)", "col", REPORTED),
    of("kernels", "bits-from-the-other-end", REPORT, "(byte >> (col % 8))", "(byte >> (7 - col % 8))", REPORTED),
    of(
        "ops", "raw-logits-by-a-temperature", REPORTS, "numbers.temperature if processed else 1.0",
        "numbers.temperature", BESIDE,
    ),
    of(
        "ops", "raw-logits-with-a-bias", REPORTS, "judged = options if processed else Sampling(",
        "judged = options if processed else Sampling(logit_bias=options.logit_bias, ", BESIDE,
    ),
    of(
        "ops", "kept-where-it-is-not-asked-for", REPORTS, "drawn.kept if options.return_kept else None", "drawn.kept",
        REPORTED,
    ),
)  # fmt: skip
