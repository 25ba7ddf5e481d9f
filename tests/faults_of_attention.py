"""Faults of attention: of its passes, of few queries, of short lengths, of its gradients, and of how calls are made."""

from fault import of

FORWARD, SCORES = "ops/attention/kernels/forward.py", "ops/attention/kernels/scores.py"
DECODE, SHORT, GRADIENT = (
    "ops/attention/kernels/decode.py",
    "ops/attention/kernels/short.py",
    "ops/attention/kernels/gradient.py",
)
CALL, CALLS, WAYS = "ops/attention/call.py", "ops/attention/calls.py", "ops/attention/ways.py"
OF_SHORT, CUDNN = "ops/attention/special.py", "ops/attention/sdpa.py"
HIDDEN = "ops/attention/kernels/hidden.py"
WINDOW = "ops/attention/plan/hopper.py"
HF, MODELS = "hf.py", "test_hf_models.py"
BY_SUM, DS = "ops/attention/hopper_bias.py", "ops/attention/kernels/hopper/ds.py"
ONE_READ = "test_attention_hopper_bias.py::test_few_keys_and_many_batches_take_one_read_of_ds"
PLAIN, OPTIONS = "test_attention.py::test_plain", "test_attention.py::test_options"
TOGETHER, EDGES = "test_attention.py::test_everything_together", "test_attention.py::test_windows_that_end_with_a_tile"
PATTERNS = "test_attention.py::test_every_pattern_of_a_bias_has_its_gradient"
NOTHING = "test_attention.py::test_rows_that_see_nothing"
SHARED = "test_attention.py::test_heads_that_share_keys"
UNWRITTEN = "test_attention.py::test_what_no_kernel_writes_is_0"
FEW, FEW_TOGETHER = "test_attention_decode.py::test_parts", "test_attention_decode.py::test_everything_together"
SHORT_BIAS = "test_attention_short.py::test_a_bias_that_batches_share_has_its_gradient"
STAY = "test_attention_sdpa.py::test_other_calls_stay"
WRONG = "test_attention_sdpa.py::test_what_cudnn_would_get_wrong_stays_with_the_kernels"
LAYOUTS = "test_attention_sdpa.py::test_gradients_of_one_kind_have_the_layouts_of_the_first"
IN_ORDER = "test_attention_ways.py::test_the_first_way_that_takes_a_forward_pass"
LARGE = "test_attention_large_scores.py::test_large_scores"
LARGE_SHORT = "test_attention_large_scores.py::test_large_scores_of_short_heads"

ATTENTION = (
    of(
        "attention", "last-tile-first-and-one-beyond", FORWARD, "        tile = n_tiles - 1 - tile\n    place",
        "        tile = n_tiles - tile\n    place",
        OPTIONS,
    ),
    of(
        "attention", "values-without-rescale", FORWARD, "v, o * weight[:, None], input_precision",
        "v, o, input_precision", PLAIN,
    ),
    of(
        "attention", "sum-without-rescale", FORWARD, "s = s * weight + tl.sum(p, axis=1)", "s = s + tl.sum(p, axis=1)",
        PLAIN,
    ),
    of(
        "attention", "nan-of-a-row-that-sees-nothing", FORWARD,
        "base = tl.where(new == NEG_INF, 0.0, new)\n        z = z * unit", "base = new\n        z = z * unit", NOTHING,
    ),
    of(
        "attention", "lse-in-log-2", FORWARD, "(origin_in_log2(m, unit) + tl.log2(s)) * LN2)",
        "origin_in_log2(m, unit) + tl.log2(s))", PLAIN,
    ),
    of(
        "attention", "sink-not-in-log-2", FORWARD, "sink_as_origin(sink.to(tl.float32) * LOG2E,",
        "sink_as_origin(sink.to(tl.float32),", "test_attention.py::test_sinks",
    ),
    of(
        "attention", "sink-that-takes-no-weight", FORWARD, "return top, s * weight + beside, t,",
        "return top, s * weight, t,",
        "test_attention.py::test_sinks",
    ),
    of(
        "attention", "entropy-by-the-old-maximum", FORWARD, "t = weight * (t + weighed(s, m - base)) + tl.sum(",
        "t = weight * t + tl.sum(",
        "test_attention.py::test_stats",
    ),
    of(
        "attention", "entropy-without-the-sink", FORWARD,
        "t = weight * (t + weighed(s, m - base)) + weighed(beside, sink - base)",
        "t = weight * (t + weighed(s, m - base))",
        "test_attention.py::test_stats",
    ),
    of(
        "attention", "keys-of-the-next-group", FORWARD,
        "k_head = dense_head(k_ptr, k_strides, place, place.head // group,",
        "k_head = dense_head(k_ptr, k_strides, place, place.head % (n_heads // group),", SHARED,
    ),
    of(
        "attention", "last-visible-key-hidden", SCORES, "tl.where(cols <= rows + (S.offset + S.right)",
        "tl.where(cols < rows + (S.offset + S.right)", OPTIONS,
    ),
    of(
        "attention", "first-visible-key-hidden", SCORES, "tl.where(cols >= rows + (S.offset - S.left)",
        "tl.where(cols > rows + (S.offset - S.left)", OPTIONS,
    ),
    of(
        "attention", "a-key-beyond-the-last", SCORES, "z = tl.where(cols < S.n_keys, z",
        "z = tl.where(cols <= S.n_keys, z", PLAIN,
    ),
    of(
        "attention", "cut-by-the-last-query", SCORES, "cut = tl.maximum(tl.minimum(first + S.offset",
        "cut = tl.maximum(tl.minimum(last + S.offset", OPTIONS,
    ),
    of(
        "attention", "keys-end-one-short", SCORES, "end = tl.maximum(tl.minimum(last + S.offset + S.right + 1,",
        "end = tl.maximum(tl.minimum(last + S.offset + S.right,", EDGES,
    ),
    of(
        "attention", "keys-begin-one-tile-late", SCORES,
        "tl.maximum(first + S.offset - S.left, 0) // K.block_n * K.block_n",
        "tl.cdiv(tl.maximum(first + S.offset - S.left, 0), K.block_n) * K.block_n", OPTIONS,
    ),
    of(
        "attention", "queries-end-one-short", SCORES, "tl.minimum(last - S.offset + S.left + 1, S.n_queries)",
        "tl.minimum(last - S.offset + S.left, S.n_queries)", EDGES,
    ),
    of(
        "attention", "queries-begin-by-the-last-key", SCORES, "begin = tl.maximum(first - S.offset - S.right",
        "begin = tl.maximum(last - S.offset - S.right", OPTIONS,
    ),
    of(
        "attention", "bias-not-in-log-2", SCORES, "return unit * A.scale if K.folds else unit",
        "return unit * A.scale if K.folds else unit / LOG2E", PATTERNS,
    ),
    of("attention", "farther-keys-are-nearer", SCORES, "z -= slope *", "z += slope *", "test_attention.py::test_alibi"),
    of(
        "attention", "softcap-in-log-2", SCORES, "tl.exp2(c * (2.0 * LOG2E / A.cap))", "tl.exp2(c * (2.0 / A.cap))",
        "test_attention.py::test_two_biases_that_differ_in_all",
    ),
    of(
        "attention", "parts-merged-without-rescale", DECODE, "tl.sum(s_parts * tl.exp2(m_parts - base), axis=0)",
        "tl.sum(s_parts, axis=0)", FEW,
    ),
    of(
        "attention", "values-of-parts-without-rescale", DECODE, "tl.sum(o_parts * weight[:, :, None], axis=0)",
        "tl.sum(o_parts, axis=0)", FEW,
    ),
    of(
        "attention", "keys-after-the-last-whole-part", DECODE,
        "tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), K.block_n), n_parts)",
        "(tl.cdiv(tl.maximum(end - begin, 0), K.block_n) // n_parts)", FEW,
    ),
    of(
        "attention", "merged-before-the-last-part", DECODE, '"acq_rel") == n_parts - 1', '"acq_rel") == n_parts - 2',
        FEW,
    ),
    of(
        "attention", "ticket-not-given-back", DECODE,
        '            tl.atomic_xchg(tickets_ptr + number, 0, sem="relaxed")\n', "",
        "test_attention_decode.py::test_tickets_are_0_again",
    ),
    of(
        "attention", "heads-and-queries-of-rows-swapped", DECODE,
        "place.head * group + rows // n_queries, rows % n_queries",
        "place.head * group + rows % group, rows // group", "test_attention_decode.py::test_options",
    ),
    of(
        "attention", "one-sink-for-a-group", DECODE, "tl.load(sinks_ptr + heads)",
        "tl.load(sinks_ptr + heads // group * group)", FEW_TOGETHER,
    ),
    of(
        "attention", "nan-of-parts-that-see-nothing", DECODE, "base = tl.where(m == NEG_INF, 0.0, m)[None, :]",
        "base = m[None, :]", "test_attention_decode.py::test_parts_and_rows_that_see_nothing",
    ),
    of(
        "attention", "parts-lose-the-entropy", OF_SHORT, "return c.stats_refused or plan_decode(",
        "return plan_decode(",
        "test_attention_decode.py::test_statistics_are_for_the_plain_kernel",
    ),
    of(
        "attention", "held-bias-not-in-log-2", SHORT, "K.bias_rows, K.ragged).to(tl.float32) * LOG2E",
        "K.bias_rows, K.ragged).to(tl.float32)", SHORT_BIAS,
    ),
    of(
        "attention", "batches-of-the-parts-after", SHORT,
        "total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)\n"
        "    for batch in tl.range(part * steps, tl.minimum((part + 1) * steps, n_batches)):",
        "total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)\n    for batch in tl.range(part * steps, n_batches):",
        SHORT_BIAS,
    ),
    of(
        "attention", "short-gradient-of-lse-added", SHORT, "delta -= tl.where(nothing, 0.0, dlse)",
        "delta += tl.where(nothing, 0.0, dlse)", "test_attention_short.py::test_lengths",
    ),
    of(
        "attention", "short-hidden-bias-looked-at", SHORT, "return tl.where(z == NEG_INF, z, z * unit + held),",
        "return z * unit + held,", "test_attention_short.py::test_a_shared_bias_of_what_is_hidden_is_not_looked_at",
    ),
    of(
        "attention", "short-nan-that-comes-back-to-lse", SHORT, "delta -= tl.where(nothing, 0.0, dlse)",
        "delta -= dlse", "test_attention_short.py::test_rows_that_see_nothing",
    ),
    of(
        "attention", "short-gradient-after-the-cap", SHORT, "ds = before_cap(ds, c, A, K).to(q.dtype)",
        "ds = ds.to(q.dtype)", "test_attention_short.py::test_options",
    ),
    of(
        "attention", "short-keys-without-the-scale", SHORT, "tl.dot(tl.trans(ds), q, input_precision=\"ieee\") * scale",
        "tl.dot(tl.trans(ds), q, input_precision=\"ieee\")", "test_attention_short.py::test_lengths",
    ),
    of(
        "attention", "held-bias-added-twice", OF_SHORT, '"bias": c.spec.bias and not held', '"bias": c.spec.bias',
        SHORT_BIAS,
    ),
    of(
        "attention", "bias-of-a-batch-held", OF_SHORT, 'any(c.strides_of("bias")[:2])', 'any(c.strides_of("bias")[:1])',
        "test_attention_short.py::test_other_biases",
    ),
    of(
        "attention", "short-gradients-of-shared-keys", OF_SHORT, "if c.group != 1 or c.spec.sinks:", "if c.spec.sinks:",
        "test_attention_short.py::test_gradients_that_are_other_kernels_work",
    ),
    of(
        "attention", "two-gradients-from-one-sum", OF_SHORT, "if len(beside) > 1:", "if False:",
        "test_attention_short.py::test_gradients_that_are_other_kernels_work",
    ),
    of(
        "attention", "short-gradients-without-the-sinks", OF_SHORT, "if c.group != 1 or c.spec.sinks:",
        "if c.group != 1:", "test_attention_short.py::test_gradients_that_are_other_kernels_work",
    ),
    of(
        "attention", "short-lengths-lose-the-entropy", OF_SHORT,
        "else asked.call.stats_refused or plan", "else plan",
        "test_attention_short.py::test_statistics_are_for_the_plain_kernel",
    ),
    of(
        "attention", "gradient-of-lse-added", GRADIENT, "delta -= tl.load(dlse_ptr + at",
        "delta += tl.load(dlse_ptr + at", PLAIN,
    ),
    of(
        "attention", "nan-that-comes-back-to-lse", GRADIENT,
        "delta = tl.where(nothing, 0.0, delta)", "delta = delta", NOTHING,
    ),
    of(
        "attention", "weights-of-rows-that-see-nothing", GRADIENT,
        'log_sum = tl.where(nothing, float("inf"), lse * LOG2E + 0.0)', "log_sum = lse * LOG2E + 0.0", NOTHING,
    ),
    of(
        "attention", "coarse-lse-untold", GRADIENT, "            tl.store(coarse_ptr, 1)",
        "            tl.store(coarse_ptr, 0)", LARGE,
    ),
    of(
        "attention", "recorded-sum-without-the-sink", GRADIENT, " + tl.exp2((sink - base) * unit)", "",
        LARGE,
    ),
    of("attention", "coarse-lse-trusted", GRADIENT, "* LOG2E > K.most_lse", "* LOG2E > 2.0**126", LARGE),
    of("attention", "recorded-maximum-ignored", SCORES, "        x = z - m\n", "        x = z\n", LARGE),
    of(
        "attention", "score-above-its-recorded-maximum", SCORES,
        'return tl.where(x > tl.where(m == 0.0, float("inf"), tl.abs(m) * -(2.0**-22)), 0.0, x)', "return x",
        "test_attention_large_scores.py::test_a_score_that_rounding_lifts_above_its_maximum_is_the_maximum",
    ),
    of("attention", "huge-maximum-rounded", SCORES, "huge_unit(unit), unit)", "unit, unit)", LARGE),
    of(
        "attention", "short-coarse-lse-trusted", SHORT, "axis=0) * LOG2E > K.most_lse", "axis=0) * LOG2E > 2.0**126",
        LARGE_SHORT,
    ),
    of(
        "attention", "short-weights-without-their-sum", SHORT,
        "return z - tl.where(s == 0.0, 0.0, tl.log2(s) / unit)[:, None]", "return z", LARGE_SHORT,
    ),
    of(
        "attention", "queries-of-another-group", GRADIENT, "of_query = number * group + of_group",
        "of_query = number + of_group * n_key_heads", SHARED,
    ),
    of("attention", "keys-without-the-scale", GRADIENT, "dk * scale, first, n_keys", "dk, first, n_keys", PLAIN),
    of("attention", "queries-without-the-scale", GRADIENT, "dq * scale, first", "dq, first", PLAIN),
    of(
        "attention", "values-of-the-last-tile-alone", GRADIENT, "do, dv, input_precision", "do, input_precision", PLAIN,
    ),
    of(
        "attention", "gradient-of-a-bias-in-the-first-tile", GRADIENT,
        "at = ds_ptr + (row + T.first) * S.n_keys", "at = ds_ptr + row * S.n_keys", PATTERNS,
    ),
    of("attention", "slope-of-the-cap", GRADIENT, "ds * (1.0 - y * y)", "ds * (1.0 - y)", OPTIONS),
    of(
        "attention", "steps-of-a-bias-rounded-down", GRADIENT, "steps = tl.cdiv(n_steps, n_parts)",
        "steps = n_steps // n_parts", "test_attention.py::test_parts_of_a_biass_gradient",
    ),
    of(
        "attention", "tile-on-the-diagonal-of-a-bias", GRADIENT, "start <= first + K.block_m - 1 + S.offset + S.right",
        "start < first + K.block_m - 1 + S.offset + S.right", EDGES,
    ),
    of(
        "attention", "tile-at-the-left-of-a-bias", GRADIENT, "start + K.block_n - 1 >= first + S.offset - S.left",
        "start + K.block_n - 1 > first + S.offset - S.left", EDGES,
    ),
    of(
        "attention", "hidden-tiles-of-a-whole-bias-unwritten", GRADIENT, "// run).to(tl.int64)) & 1 == 0:",
        "// run).to(tl.int64)) & 1 == 2:",
        "test_attention_hidden.py::test_where_nothing_is_seen_gradients_of_a_whole_bias_are_0",
    ),
    of(
        "attention", "first-queries-speak-for-a-tile", HIDDEN, "row += _ROWS", "row += BLOCK_M",
        "test_attention_hidden.py::test_results",
    ),
    of(
        "attention", "one-tile-over-and-over", HIDDEN, "word ^ lowest, word)", "word, word)",
        "test_attention_hidden.py::test_results",
    ),
    of(
        "attention", "first-tile-of-a-run-alone", HIDDEN, "at == run - 1, word ^", "at == 0, word ^",
        "test_attention_hidden.py::test_more_tiles_than_a_word_has_bits",
    ),
    of(
        "attention", "one-mask-for-all-heads-of-a-tile", "ops/attention/special.py",
        'not (c.spec.mask_rows or c.strides_of("mask")[2])', "not c.spec.mask_rows",
        "test_attention_hidden.py::test_few_queries_over_padded_keys",
    ),
    of(
        "attention", "batches-of-a-bias-swapped", GRADIENT, "of_query = (at_outer * n_inner + at_inner) * n_heads",
        "of_query = (at_outer + at_inner) * n_heads", "test_attention.py::test_many_leading_dims",
    ),
    of(
        "attention", "column-sums-of-the-last-tile", "ops/attention/kernels/stats.py",
        "sums += sums_of(k, q_head, record, first, start,", "sums = sums_of(k, q_head, record, first, start,",
        "test_attention.py::test_stats",
    ),
    of(
        "attention", "least-score-as-a-maximum", CALL, "how.softcap is None and how.scale > 0", "how.softcap is None",
        OPTIONS,
    ),
    of(
        "attention", "last-keys-by-the-tile-of-queries", CALL, "self.n_keys % tiles.block_n",
        "self.n_keys % tiles.block_m", "test_attention.py::test_keys_after_the_last_tile",
    ),
    of(
        "attention", "window-that-hides-one-key", CALL, "return None if left is None or left >= most else left",
        "return None if left is None or left >= most - 1 else left", EDGES,
    ),
    of(
        "attention", "window-that-hides-one-query", CALL, "return None if right is None or right >= most else right",
        "return None if right is None or right >= most - 1 else right", EDGES,
    ),
    of(
        "attention", "keys-that-the-last-query-sees", CALL, "max(0, offset - self._left)",
        "max(0, self.n_queries - 1 + offset - self._left)",
        "test_attention_decode.py::test_plans_are_of_the_keys_that_are_seen",
    ),
    of(
        "attention", "two-gradients-of-one-memory", CALLS,
        "found.clone() if found is own.ds and len(full) > 1 else found", "found",
        "test_attention.py::test_gradients_share_no_memory",
    ),
    of(
        "attention", "hidden-gradients-left-unwritten", CALLS,
        "make = torch.zeros if asked.how.bounded else torch.empty",
        "make = torch.empty", UNWRITTEN,
    ),
    of(
        "attention", "gradients-of-no-queries-unwritten", CALLS,
        "    if c.all_heads * c.n_queries:\n", "    if True:\n", UNWRITTEN,
    ),
    of(
        "attention", "a-bias-alone-without-its-gradient", CALLS, "(wanted.query or bool(full))", "wanted.query",
        "test_attention.py::test_only_what_is_asked_for",
    ),
    of(
        "attention", "sink-gradient-of-the-other-sign", CALLS, "terms = -p * delta", "terms = p * delta",
        "test_attention.py::test_sinks",
    ),
    of(
        "attention", "dims-merged-of-which-one-is-broadcast", "ops/attention/layout.py",
        "and (sizes[self._dims[-1][-1]] == 1) == (sizes[d] == 1)\n", "", "test_attention.py::test_many_leading_dims",
    ),
    of(
        "attention", "bottom-right-by-cudnn", CUDNN,
        "(how.left, how.right, how.offset(query.shape[-2], given.key.shape[-2])) == (None, 0, 0)",
        "(how.left, how.right) == (None, 0)", STAY,
    ),
    of("attention", "softcap-by-cudnn", CUDNN, '"it has a softcap": how.softcap is not None,', "", STAY),
    of("attention", "negative-scale-by-cudnn", CUDNN, '"its scale is not positive": how.scale <= 0,', "", STAY),
    of(
        "attention", "broadcast-keys-by-cudnn", CUDNN,
        '"a tensor is broadcast": any(0 in each.stride() for each in given[:3]),', "", STAY,
    ),
    of(
        "attention", "not-deterministic-where-asked", CUDNN, "if how.deterministic:", "if False:", STAY,
    ),
    of(
        "attention", "gradient-of-lse-lost-by-cudnn", CUDNN, "if asked.dlse is not None:", "if False:",
        "test_attention_sdpa.py::test_a_gradient_of_lse_is_the_kernels_of_what_cudnn_left",
    ),
    of(
        "attention", "all-gradients-for-one", CUDNN, "not all(asked.wanted[:3])", "not any(asked.wanted[:3])",
        "test_attention_sdpa.py::test_what_is_asked_beside_the_output",
    ),
    of(
        "attention", "strided-gradient-for-cudnn", CUDNN, "            of_do(do), query,", "            do, query,",
        "test_attention_sdpa.py::test_cudnn_gets_a_gradient_whose_last_dim_is_contiguous",
    ),
    of("attention", "base-off-16-bytes-by-cudnn", CUDNN, "if each.data_ptr() % 16 or not whole", "if not whole", WRONG),
    of(
        "attention", "rows-off-16-bytes-by-cudnn", CUDNN, "any(step == 0 or step % 16 for step in steps)",
        "any(step == 0 for step in steps)", WRONG,
    ),
    of(
        "attention", "more-than-31-bits-by-cudnn", CUDNN, "for size, step in dims) >= MOST_ELEMENTS:",
        "for size, step in dims) < 0:",
        "test_attention_sdpa.py::test_so_do_tensors_whose_offsets_need_more_than_31_bits",
    ),
    of("attention", "a-graph-of-cudnns-that-torch-has-made", CUDNN, "_APART = -0.0", "_APART = 0.0", LAYOUTS),
    of(
        "attention", "a-gradient-that-lies-otherwise-than-the-first", CUDNN, "return _layouts.setdefault(kind, own)",
        "return own", LAYOUTS,
    ),
    of(
        "attention", "taken-where-a-way-is-switched-off", CUDNN,
        "cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled() and cuda.math_sdp_enabled()",
        "cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()",
        "test_patch_attention.py::test_all_else_stays",
    ),
    of(
        "attention", "room-for-ds-that-no-kernel-makes", BY_SUM,
        "    if isinstance(tiles, str):\n        return tiles\n", "",
        "test_attention_hopper_bias.py::test_where_other_kernels_compute_no_room_is_made",
    ),
    of(
        "attention", "hidden-ds-left-as-it-was", BY_SUM, "if c.how.bounded:", "if False:",
        "test_attention_hopper_bias.py::test_gradients_by_the_sum_of_ds",
    ),
    of(
        "attention", "ds-beyond-the-last-key", BY_SUM,
        "sums.add(ds[..., : c.n_keys], ", "sums.add(ds[..., -c.n_keys :], ",
        "test_attention_hopper_bias.py::test_gradients_by_the_sum_of_ds",
    ),
    of(
        "attention", "dq-of-some-heads-lost", BY_SUM, "if not whole:", "if False:",
        "test_attention_hopper_bias.py::test_gradients_by_the_sum_of_ds",
    ),
    of(
        "attention", "sum-of-the-last-heads-alone", BY_SUM,
        "self.found[0] if self.at_once else", "self.found[-1] if True else",
        "test_attention_hopper_bias.py::test_gradients_by_the_sum_of_ds",
    ),
    of(
        "attention", "heads-of-the-group-counted-as-one", BY_SUM,
        "slice(turn.first * c.group, turn.last * c.group)", "slice(turn.first, turn.last)",
        "test_attention_hopper_bias.py::test_gradients_by_the_sum_of_ds",
    ),
    of("attention", "ds-of-no-key-counts", DS, "tl.where(cols < n_keys, ", "tl.where(cols < width, ", ONE_READ),
    of(
        "attention", "ds-of-other-heads", DS, "((number * n_heads + head) * n_queries + first) * width",
        "((number * all_heads + head) * n_queries + first) * width", ONE_READ,
    ),
    of("attention", "dq-of-the-first-heads", DS, "whole_head = first_head + head", "whole_head = head", ONE_READ),
    of("attention", "keys-of-the-first-tile", DS, "load_tile(k_head, start, ", "load_tile(k_head, 0, ", ONE_READ),
    of(
        "attention", "batches-after-the-last-part", BY_SUM, "= (blocks(c.n_batches, steps), heads,",
        "= (c.n_batches // steps, heads,", ONE_READ,
    ),
    of("attention", "dq-without-its-scale", DS, "dq * scale", "dq", ONE_READ),
    of(
        "attention", "tile-that-a-window-cuts-taken-as-whole", WINDOW, "pieces - width // ROWS,",
        "pieces - 1 - width // ROWS,", "test_attention_window.py::test_tiles_that_the_window_cuts",
    ),
    of(
        "attention", "tiles-of-one-query", WINDOW, "n_queries < LEAST_QUERIES or ", "",
        "test_attention_window.py::test_few_queries_of_many_heads_go_elsewhere",
    ),
    of(
        "attention", "heads-that-a-span-cuts", WINDOW, "if group % span == 0", "if True",
        "test_attention_window.py::test_heads_that_a_program_goes_through",
    ),
    of(
        "attention", "widened-output-uncut", CALLS, "found.output[..., :dim].contiguous()", "found.output",
        "test_attention.py::test_heads_of_16_bits_that_no_vectors_fill",
    ),
    of(
        "attention", "widened-gradients-uncut", CALLS, "each[..., : like.shape[-1]].contiguous()", "each",
        "test_attention.py::test_heads_of_16_bits_that_no_vectors_fill",
    ),
    of(
        "attention", "the-last-way-that-takes-a-pass", WAYS, "for way in ways:", "for way in reversed(ways):", IN_ORDER,
    ),
    of("attention", "ways-refuse-without-a-word", WAYS, "refused[way.name] = plan", "pass", IN_ORDER),
    of(
        "attention", "the-calls-number-for-a-launchs-own", CALL, "self.numbers | dict(values)",
        "dict(values) | self.numbers", "test_attention_ways.py::test_arguments_are_found_by_the_names_of_parameters",
    ),
    of(
        "attention", "two-patterns-of-shared-memory", "ops/attention/plan/tiles.py", "least = min(SWIZZLE, max(dims))",
        "least = LEAST", "test_plan.py::test_heads_of_16_bits_have_one_pattern_in_shared_memory",
    ),
    of(
        "attention", "long-tiles-for-the-narrowest-windows", "ops/attention/plan/tiles.py", "and n_keys > 64 and",
        "and seen > 64 and",
        "test_attention_window.py::test_windows_that_other_kernels_take_have_tiles_of_short_reach",
    ),
    of(
        "attention", "own-code-of-a-model-gets-our-masks", HF, 'if "own" in attentions:', "if False:",
        f"{MODELS}::test_outputs_gradients_and_tokens_are_eagers[bloom]",
    ),
    of(
        "attention", "a-dict-of-attention-classes-is-not-seen", HF, "ATTENTION_CLASSES\\[|_attn_implementation",
        "_attn_implementation", f"{MODELS}::test_own_code_keeps_eager_where_the_name_is_set_later",
    ),
    of(
        "attention", "a-mask-that-code-looks-at-is-skipped", HF,
        "if opaque and '_attn_implementation == \"sdpa\"' not in source else", "if opaque else",
        f"{MODELS}::test_the_last_queries_alone_see_what_eagers_see",
    ),
    of(
        "attention", "code-that-adds-masks-gets-bools", HF, "_EAGERS_MASKS.add(type(model.config))", "pass",
        f"{MODELS}::test_outputs_gradients_and_tokens_are_eagers[deepseek_v4]",
    ),
    of(
        "attention", "no-mask-of-eager-is-causal", HF,
        'and not _has_eagers_masks(getattr(module, "config", None))', "",
        f"{MODELS}::test_no_mask_hides_nothing_where_the_masks_are_eagers",
    ),
    of(
        "attention", "a-mask-left-out-is-causal", HF, "is not bidirectional_mask_function:", "is not None:",
        f"{MODELS}::test_a_vision_tower_that_says_it_is_causal_is_not",
    ),
    of(
        "attention", "collected-weights-are-none", HF, 'others.get("output_attentions") or _weights_are_collected()',
        'others.get("output_attentions")', f"{MODELS}::test_weights_that_are_asked_for_raise",
    ),
    of(
        "attention", "cleared-before-stored-ds", "ops/attention/calls.py",
        "dq, dk, dv, dbias = self.by_ds(", "own.coarse.zero_()\n            dq, dk, dv, dbias = self.by_ds(",
        "test_attention_ways.py::test_gradients_by_stored_ds_are_told_of_a_coarse_lse_and_leave_no_word_of_it",
    ),
)  # fmt: skip
