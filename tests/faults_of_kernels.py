"""Faults of the kernels, of the planner, and of how their arguments are laid out and given."""

from fault import of

KERNELS = (
    of(
        "kernels", "nothing-asked-of-a-mean-of-weight-0", "ops/losses/kernels/gradient.py",
        "g = tl.where(dy == 0.0, 0.0, g * dy)", "g = g * dy",
        "test_losses_seams.py::test_what_stands_beside_a_mean_of_weight_0_has_a_finite_gradient",
    ),
    of(
        "kernels", "lanes-without-a-part-at-0", "ops/softmax/kernels/columns.py",
        "tl.maximum(m_parts, -GREATEST), s_parts", "tl.maximum(m_parts, 0.0), s_parts",
        "test_columns.py::test_logsumexp_of_low_numbers_in_parts",
    ),
    of(
        "kernels", "no-gradient-where-the-share-is-0", "ops/softmax/kernels/gradient.py",
        "dx = tl.where(y == NEG_INF, 0.0, dx)", "dx = tl.where(share == 0.0, 0.0, dx)",
        "test_backward.py::test_log_softmax_of_a_mask_has_gradients_where_the_share_is_0",
    ),
    of(
        "kernels", "a-sink-by-the-strides-of-the-scale", "ops/softmax/kernels/scores.py",
        "S.sink_0, S.sink_1, S.sink_2)",
        "S.scale_0, S.scale_1, S.scale_2)", "test_sink.py::test_every_strategy",
    ),
    of(
        "kernels", "a-sink-that-is-no-maximum", "core/kernels/state.py", "m, s = merge_score(m, s, sink, sink, K.ptx)",
        "s = merge_score(m, s, sink, sink, K.ptx)[1]", "test_sink.py::test_every_strategy",
    ),
    of(
        "kernels", "a-sink-of-infinity-has-no-lse", "core/kernels/state.py",
        "merge_score(m, s, finite_top(sink), sink,",
        "merge_score(m, s, sink, sink,", "test_sink.py::test_logsumexp_by_every_strategy",
    ),
    of(
        "kernels", "mask-past-the-size", "core/kernels/rows.py", "cols < size, OTHER, K)", "cols <= size, OTHER, K)",
        "test_shelf.py::test_pieces_end_with_the_row",
    ),
    of(
        "kernels", "fp8-without-nan", "core/kernels/state.py", "tl.abs(y) == 480.0", "tl.abs(y) == 481.0",
        "test_fp8.py::test_every_byte_is_the_float16_of_the_same_value",
    ),
    of(
        "kernels", "fp8-zero-past-the-size", "core/kernels/state.py", "(tl.zeros([], tl.float32) + other)",
        "tl.zeros([], tl.float32)", "test_fp8.py::test_every_byte_in_a_row",
    ),
    of(
        "kernels", "causal-column-less", "ops/softmax/kernels/scores.py",
        ".to(tl.int32) + 1 + n_cols", ".to(tl.int32) + n_cols", "test_scores.py::test_causal",
    ),
    of(
        "kernels", "causal-top-left", "ops/softmax/kernels/scores.py", "+ 1 + n_cols - n_queries", "+ 1",
        "test_scores.py::test_causal",
    ),
    of(
        "kernels", "merge-without-rescale", "core/kernels/state.py", "s_a * weight_of(m_a, m, PTX) +", "s_a +",
        "test_shelf.py::test_merges_of",
    ),
    of(
        "kernels", "stream-without-rescale", "ops/softmax/kernels/forward.py",
        "s = tl.sum(rounded_product(s_parts, weight_of(m_parts, m, K.ptx)), axis=0)", "s = tl.sum(s_parts, axis=0)",
        "test_softmax.py::test_stream_at_the_ends_of_its_parts",
    ),
    of(
        "kernels", "columns-without-rescale", "ops/softmax/kernels/columns.py", "s *= natural_exp(m - top, K.ptx)",
        "s *= 1.0",
        "test_columns.py::test_logsumexp_tile_by_tile",
    ),
    of(
        "kernels", "edge-by-the-wrong-stride", "ops/softmax/kernels/forward.py",
        "y_ptr + r.row * y_row_stride + edge.cols", "y_ptr + r.row * x_row_stride + edge.cols",
        "test_softmax.py::test_row_strides_by_every_strategy",
    ),
    of(
        "kernels", "part-too-short", "core/kernels/rows.py",
        "tl.minimum(whole_vectors(part_cols, K), body - start)",
        "tl.minimum(whole_vectors(part_cols, K), body - start - 1)",
        "test_softmax.py::test_split_in_few_and_many_parts",
    ),
    of(
        "kernels", "stale-tag", "core/kernels/exchange.py", "tag = 1 - tag", "tag = 0 + tag",
        "test_shelf.py::test_a_launch_that_publishes_has_the_tag_that_its_slots_have_not",
    ),
    of(
        "kernels", "any-tag-will-do", "core/kernels/exchange.py",
        "    missing = wanted & (tag_of(message) != tag)\n    left = ", "    missing = wanted & False\n    left = ",
        "test_shelf.py::test_what_is_wanted_is_read_until_it_carries_the_tag",
    ),
    of(
        "kernels", "edges-not-in-the-sum", "core/kernels/rows.py",
        "s += of_each_row(tl.sum(exp_at", "s += 0 * of_each_row(tl.sum(exp_at",
        "test_softmax.py::test_rows_that_start_at_every_phase",
    ),
    of(
        "kernels", "edges-not-in-the-gradient", "ops/softmax/kernels/gradient.py",
        "d += of_each_row(dot_of(", "d += 0 * of_each_row(dot_of(",
        "test_backward.py::test_rows_that_start_at_every_phase",
    ),
    of(
        "kernels", "wrong-log", "core/kernels/state.py", "y = z - m - log_sum_of(", "y = z - m + log_sum_of(",
        "test_scores.py::test_any_dim",
    ),
    of(
        "kernels", "rounding-of-the-base-left-in", "core/kernels/state.py",
        "0.0, tl.log(s) - rounding * LN2)", "0.0, tl.log(s))",
        "test_scores.py::test_log_softmax_of_high_rows_in_the_arithmetic_of_nvidia",
    ),
    of(
        "kernels", "last-of-tied-parts", "core/kernels/exchange.py",
        "winner = tl.min(tl.where(m_parts == m, j, K.lanes)", "winner = tl.max(tl.where(m_parts == m, j, -1)",
        "test_scores.py::test_scale_0_takes_the_first_of_equal_maxima",
    ),
    of(
        "kernels", "tie-after-the-edge", "ops/softmax/kernels/scores.py",
        "column = tl.minimum(column, of_each_row(tl.min(tl.where(edge.x == m, edge.cols, NO_COLUMN)",
        "column = tl.minimum(column, of_each_row(tl.min(tl.where(edge.x > m, edge.cols, NO_COLUMN)",
        "test_scores.py::test_scale_0_takes_the_first_of_equal_maxima",
    ),
    of(
        "kernels", "nan-of-two-infinities", "core/kernels/state.py",
        "finite = tl.where(m == NEG_INF, 0.0, m)", "finite = m",
        "test_softmax.py::test_tiles_of_minus_infinity_leave_the_row_finite",
    ),
    of(
        "kernels", "nan-of-an-empty-part", "core/kernels/state.py",
        "return tl.where(m == NEG_INF, 1.0, weight)", "return weight",
        "test_shelf.py::test_weight_in_a_row_of_no_finite_maximum",
    ),
    of(
        "kernels", "masked-input-of-negative-scales", "ops/softmax/kernels/scores.py",
        'masked_input = tl.where(sign == -1, float("inf"), NEG_INF)',
        "masked_input = tl.where(sign == -1, NEG_INF, NEG_INF)", "test_scores.py::test_every_strategy",
    ),
    of(
        "kernels", "columns-past-the-size", "ops/softmax/kernels/columns.py",
        "here, p * K.block_cols + cols < c.size, OTHER", "here, p * K.block_cols + cols <= c.size, OTHER",
        "test_softmax.py::test_any_dim_of_any_shape",
    ),
    of(
        "kernels", "mask-of-a-part-from-its-row's-start", "ops/softmax/kernels/column_tiles.py",
        "here += c.start.to(tl.int64) * stride", "here += c.start.to(tl.int64) * 0",
        "test_column_scores.py::test_by_parts",
    ),
    of(
        "kernels", "mask-of-the-first-tile", "ops/softmax/kernels/column_tiles.py", "if p == 0 or K.mask_cols:",
        "if p == 0:",
        "test_column_scores.py::test_every_broadcast",
    ),
    of(
        "kernels", "mask-of-neighbouring-positions", "ops/softmax/kernels/column_tiles.py",
        "at += inner.to(tl.int64) * S.mask_inner", "at += inner.to(tl.int64)",
        "test_column_scores.py::test_layouts_that_have_such_strides",
    ),
    of(
        "kernels", "scale-of-the-first-position", "ops/softmax/kernels/column_tiles.py",
        "c.inner[None, :].to(tl.int64) * S.scale_inner", "c.inner[None, :].to(tl.int64) * 0",
        "test_column_scores.py::test_every_broadcast",
    ),
    of(
        "kernels", "every-greedy-maximum", "ops/softmax/kernels/column_tiles.py", "(p * K.block_cols + cols != first)",
        "(scores_of(x, q.factor, K) != m)", "test_column_scores.py::test_the_first_of_equal_maxima",
    ),
    of(
        "kernels", "strides-of-three-indices", "ops/softmax/scores.py",
        "if any(view.stride(b) != view.stride(a) * shape[a] for a, b in itertools.pairwise(dims)):",
        "if False:", "test_column_scores.py::test_what_has_no_such_strides_goes_through_rows",
    ),
    of(
        "kernels", "gradient-without-its-factor-over-columns", "ops/softmax/kernels/columns.py",
        "gradient_of(y[p], dy[p], d, factor, K)", "gradient_of(y[p], dy[p], d, 1.0, K)",
        "test_column_scores.py::test_a_gradient_by_parts_with_a_factor",
    ),
    of(
        "kernels", "hidden-piece-not-written", "ops/softmax/kernels/causal.py",
        "tl.static_range(SEEN, PIECES)", "tl.static_range(SEEN + 1, PIECES)",
        "test_scores.py::test_causal_rows_of_every_length",
    ),
    of(
        "kernels", "entropy-of-parts-not-moved", "ops/losses/kernels/common.py",
        "(u + tl.where(s > 0.0, m_part - m, 0.0) * s) * fade", "u * fade",
        "test_linear_by_classes.py::test_losses_and_gradients_of_transposed_logits",
        "test_cross_entropy.py::test_losses_alone",
    ),
    of(
        "kernels", "the-likeliest-class-of-any-part", "ops/losses/kernels/transposed.py",
        "tl.where(m_part == m, tl.load(found_ptr + at), NO_COLUMN)", "tl.load(found_ptr + at)",
        "test_linear_by_classes.py::test_losses_and_gradients_of_transposed_logits",
    ),
    of(
        "kernels", "target-without-its-bias", "ops/losses/kernels/transposed.py",
        "mask=owns), bias_ptr, first + t, owns, K)", "mask=owns), None, first + t, owns, K)",
        "test_linear_by_classes.py::test_losses_and_gradients_of_transposed_logits",
    ),
    of(
        "kernels", "sum-with-a-bias-rounded", "ops/losses/linear_by_classes.py",
        "x.dtype if bias is None else self.dtype", "x.dtype",
        "test_linear_by_classes.py::test_losses_and_gradients_of_transposed_logits",
    ),
    of(
        "kernels", "lse-without-its-sum", "ops/losses/kernels/transposed.py",
        "tl.store(lse_ptr + token, m + ls", "tl.store(lse_ptr + token, m",
        "test_linear_by_classes.py::test_losses_and_gradients_of_transposed_logits",
    ),
    of(
        "kernels", "given-lse-of-one-row-for-all", "ops/losses/kernels/online.py",
        "lse = tl.load(lse_ptr + row)", "lse = tl.load(lse_ptr + row * 0)",
        "test_loss_given_lse.py::test_loss_and_gradient",
    ),
    of(
        "kernels", "sum-of-logits-not-moved", "ops/losses/kernels/transposed.py",
        "wz -= w * tl.where(m == NEG_INF", "wz += w * tl.where(m == NEG_INF",
        "test_linear_by_classes.py::test_losses_and_gradients_of_transposed_logits",
    ),
    of(
        "kernels", "entropy-by-the-wrong-maximum", "ops/losses/kernels/online.py",
        "u = faded_terms(u, s, m, m_tile, fade) + entropy_terms", "u = u * fade + entropy_terms",
        "test_cross_entropy.py::test_losses_alone",
    ),
    of(
        "kernels", "rows-in-32-bits", "core/kernels/rows.py", "return program.to(tl.int64)", "return program",
        "test_compiles.py::test_rows_are_addressed_in_64_bits", compiles=True,
    ),
    of(
        "kernels", "alignment-unknown", "core/kernels/rows.py",
        "return row * (x.stride // K.vector * K.vector)", "return row * x.stride",
        "test_family_compiles.py::test_logsumexp", "test_family_compiles.py::test_backward", compiles=True,
    ),
    of(
        "kernels", "nested-strides-swapped", "core/kernels/rows.py", "(odd_0 >> 1) * V, (odd_1 >> 1) * V,",
        "(odd_1 >> 1) * V, (odd_0 >> 1) * V,", "test_layouts.py::test_every_strategy",
    ),
    of(
        "kernels", "columns-by-one-outer-stride", "ops/softmax/kernels/columns.py",
        "ptr += nested_offset(c.outer, outer_stride, K)",
        "ptr += nested_offset(c.outer * 0, outer_stride, K)", "test_layouts.py::test_columns",
    ),
)  # fmt: skip

PLAN = (
    of(
        "plan", "threshold-of-tiles", "core/plan/rows.py", "    if n_cols <= shared:", "    if n_cols < shared:",
        "test_plan.py::test_edges_are_where_plans_change", "test_plan_kept.py",
    ),
    of(
        "plan", "parts-rounded-down", "core/plan/strategies.py",
        "    parts = -(-body // part_cols)\n    lanes", "    parts = body // part_cols\n    lanes",
        "test_plan.py::test_every_shape_has_a_plan_that_covers_it",
    ),
    of(
        "plan", "full-pieces-too-many", "core/plan/strategies.py",
        "min(pieces, shortest // block_cols)", "min(pieces, -(-shortest // block_cols))",
        "test_plan.py::test_every_shape_has_a_plan_that_covers_it",
    ),
    of(
        "plan", "full-pieces-of-a-shifted-row", "core/plan/strategies.py",
        'body - (rows.vector if rows.alignment == "shifted" else 0)', "body",
        "test_plan.py::test_every_shape_has_a_plan_that_covers_it",
    ),
    of(
        "plan", "full-pieces-of-columns", "ops/softmax/plan.py",
        "full_pieces=(n_cols - (parts - 1) * part_cols) // block_cols", "full_pieces=part_cols // block_cols",
        "test_softmax.py::test_any_dim_of_any_shape",
    ),
    of(
        "plan", "prefetch-of-scalar-rows", "core/plan/strategies.py",
        'if strategy == "stream" or rows.alignment == "scalar":', 'if strategy == "stream":',
        "test_plan_kept.py",
    ),
    of(
        "plan", "prefetch-past-the-last-row", "core/plan/strategies.py",
        "prefetch if rows.n_rows > most_rows else 0", "prefetch if rows.n_rows >= most_rows else 0",
        "test_plan_spans.py::test_within_its_span_a_plan_is_what_the_planner_gives",
        "test_plan_spans.py::test_every_number_of_rows_up_to_more_than_any_threshold",
    ),
    of(
        "plan", "same-rows-across-prefetch", "core/plan/strategies.py",
        "same_rows = both(same_rows, side_of(rows.n_rows, most_rows))", "same_rows = both(same_rows, ANY_ROWS)",
        "test_plan_spans.py::test_within_its_span_a_plan_is_what_the_planner_gives",
    ),
    of(
        "plan", "same-rows-of-few", "core/plan/strategies.py", "True, (above + 1, most_few)", "True, (1, most_few)",
        "test_plan_spans.py::test_within_its_span_a_plan_is_what_the_planner_gives",
        "test_plan_spans.py::test_every_number_of_rows_up_to_more_than_any_threshold",
    ),
    of(
        "plan", "same-rows-of-parts", "core/plan/rows.py",
        "(programs - 1) // (fewest - 1)", "programs // (fewest - 1)",
        "test_plan_spans.py::test_within_its_span_a_plan_is_what_the_planner_gives",
        "test_plan_spans.py::test_every_number_of_rows_up_to_more_than_any_threshold",
    ),
    of(
        "plan", "same-rows-of-a-loss", "core/plan/rows.py",
        "same_rows = side_of(n_rows, REDUCTION_PROGRAMS * sm_count - 1)", "same_rows = ANY_ROWS",
        "test_plan_spans.py::test_within_its_span_a_plan_is_what_the_planner_gives",
    ),
    of(
        "plan", "parts-of-one-stream-alone", "core/plan/rows.py",
        "device.sm_count * max(1, resident) // 2", "device.sm_count * max(1, resident)", "test_plan_kept.py",
    ),
    of(
        "plan", "parts-of-a-loss", "core/plan/rows.py",
        "plan.parts > most_parts(plan, device, registers=ALL_REGISTERS)", "plan.parts > most_parts(plan, device)",
        "test_plan.py::test_a_loss_splits_a_row_of_32_warps_and_streams_what_the_chip_cannot_hold",
    ),
    of(
        "plan", "causal-rows-fetch-ahead", "core/plan/rows.py",
        "known and not causal", "known",
        "test_plan.py::test_programs_fetch_ahead_where_the_gpu_can_and_the_next_data_is_known",
    ),
)  # fmt: skip

RUNNER = (
    of(
        "runner", "numbers-in-another-order", "core/runner.py",
        "names.scalars.index(name) for name in numbers", "names.scalars.index(name) for name in reversed(numbers)",
        "test_cross_entropy.py::test_public",
    ),
    of(
        "runner", "publish-and-collect-swapped", "core/runner.py",
        '({"collect": False}, {"publish": False})', '({"publish": False}, {"collect": False})',
        "test_softmax.py::test_split_in_few_and_many_parts",
    ),
    of(
        "runner", "slots-of-fewer-rows", "core/runner.py",
        "return _launched(there, other, grown, kind)",
        "return _launched(there, plan, grown, kind)",
        "test_runner.py::test_a_run_for_more_rows_has_slots_for_all",
    ),
    of(
        "runner", "slots-of-fewer-rows-in-turn", "core/runner.py",
        "torch.zeros(groups * slots_per_group, dtype", "torch.zeros(groups, dtype",
        "test_runner.py::test_a_run_for_more_rows_has_slots_for_all",
    ),
    of(
        "runner", "slots-too-few", "core/workspace.py",
        "kept.numel() < n_rows * slots_per_row", "kept.numel() < n_rows",
        "test_runner.py::test_kept_slots_are_enough_or_made_anew",
    ),
    of(
        "runner", "misalignment-0", "core/runner.py",
        "first.data_ptr() // first.element_size() % vector", "0",
        "test_runner.py::test_a_kernel_is_told_how_far_off_16_bytes_rows_start",
    ),
    of(
        "runner", "rows-not-updated", "core/runner.py",
        '"n_rows": other.n_rows, "n_programs"', '"n_programs"',
        "test_calls.py::test_a_call_of_other_rows_asks_the_planner_for_nothing_but_their_number",
    ),
    of(
        "runner", "prefetch-kept-where-none-is", "core/runner.py",
        'if "ahead" not in names.scalars:', 'if "ahead" in names.scalars:',
        "test_compiles.py::test_fetching_ahead_is_of_sm_90_on", compiles=True,
    ),
    of(
        "runner", "scale-by-the-strides-of-the-mask", "ops/softmax/scores.py",
        "col_stride, *strides[1], n_queries)", "col_stride, *strides[0], n_queries)",
        "test_scores.py::test_scales_of_every_layout",
    ),
    of(
        "runner", "mask-of-one-column-per-key", "ops/softmax/scores.py", "else views[0].stride(-1)", "else 1",
        "test_scores.py::test_masks_of_every_layout",
    ),
    of(
        "runner", "leading-value-not-updated", "ops/softmax/scores.py",
        'leading = {1: "n_2", 2: "n_1"}.get(len(sizes))', "leading = None",
        "test_calls.py::test_a_call_of_other_rows_asks_the_planner_for_nothing_but_their_number",
    ),
    of(
        "runner", "leading-value-of-outer-rows", "core/runner.py",
        "{name: value // of * n for name, value in grows.items()}", "{name: n for name, value in grows.items()}",
        "test_calls.py::test_a_call_of_other_rows_asks_the_planner_for_nothing_but_their_number",
    ),
    of(
        "runner", "dims-merged-that-do-not-follow", "core/layout.py", "all(outer == size * inner for",
        "all(outer >= size * inner for", "test_scores.py::test_masks_of_every_layout",
    ),
    of(
        "runner", "rows-flattened-that-lie-apart", "core/layout.py", "elif stride != n_rows * row_stride:",
        "elif stride < n_rows * row_stride:",
        "test_softmax.py::test_strides", "test_softmax.py::test_any_dim_of_any_shape",
    ),
    of(
        "runner", "nested-rows-taken-for-shifted", "core/layout.py", "2 * vector and not nested", "2 * vector",
        "test_layouts.py::test_rows_of_odd_length",
    ),
    of(
        "runner", "inner-positions-of-one-tensor-alone", "core/layout.py", "all(each.stride(outer[-1]) == n_inner",
        "any(each.stride(outer[-1]) == n_inner", "test_layouts.py::test_columns",
    ),
    of(
        "runner", "tuples-of-any-widths-are-one-kernel", "core/launch.py",
        "return tuple(_kind(each) for each in scalar)",
        "return tuple",
        "test_launch.py::test_over_the_stub_driver", compiles=True,
    ),
    of(
        "runner", "nested-strides-that-triton-looks-at", "core/runner.py", "tensor.stride(d) // vector * 2 + 1",
        "tensor.stride(d) // vector * 2",
        "test_layouts_compile.py::test_nothing_is_compiled_in_of_strides_but_a_0", compiles=True,
    ),
    of(
        "runner", "shifted-by-different-phases", "core/layout.py", "len(places) == 1 and x.shape[-1]", "x.shape[-1]",
        "test_softmax.py::test_out_with_strides_of_its_own_is_written_and_nothing_beside_it",
        "test_softmax.py::test_strides",
    ),
)  # fmt: skip
