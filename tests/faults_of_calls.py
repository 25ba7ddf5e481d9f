"""Faults of launches and kept calls, of the operators, and of their rules in PyTorch's library."""

from fault import of

CALLS = (
    of(
        "calls", "guard-without-alignment", "core/calls.py", "if check(*tensors) and _places(tensors) == places:",
        "if check(*tensors):",
        "test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone",
    ),
    of(
        "calls", "guard-that-compares-nothing", "core/calls.py", "if check(*tensors) and _places(tensors) == places:",
        "if _places(tensors) == places:",
        "test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone",
    ),
    of(
        "calls", "guard-in-c-without-alignment", "core/lookup.c", "like == 1 && i < n", "like == 1 && i < 0",
        "test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone",
    ),
    of(
        "calls", "guard-in-c-of-the-first-alone", "core/lookup.c", "like == 1 && i < n", "like == 1 && i < 1",
        "test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone",
    ),
    of(
        "calls", "look-up-in-c-beside-a-mode", "core/lookup.c", "if (watched || n_others", "if (n_others",
        "test_calls.py::test_where_something_watches_the_look_up_in_c_finds_nothing",
    ),
    of(
        "calls", "guard-without-dtype", "core/calls.py", "tensor.stride(), tensor.dtype, tensor.device",
        "tensor.stride(), tensor.device",
        "test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone",
    ),
    of(
        "calls", "guard-without-grad-mode", "core/calls.py",
        "grad = torch.is_grad_enabled() and tensor.requires_grad", "grad = tensor.requires_grad",
        "test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone",
    ),
    of(
        "calls", "guard-without-modes", "core/calls.py", "return modes == _modes() and all(", "return all(",
        "test_calls.py::test_under_the_plain_guard_a_mode_sees_a_call_that_was_kept",
    ),
    of(
        "calls", "other-rows-of-another-alignment", "core/calls.py", "and places == _places(tensors) and", "and",
        "test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone",
    ),
    of(
        "calls", "others-of-fewer-rows", "core/calls.py",
        "and all(tensors[i].shape[0] == n for i in led)", "and True",
        "test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone",
    ),
    of(
        "calls", "cache-without-a-bound", "core/calls.py", "if len(_kept) >= MOST_CALLS:", "if not _kept:",
        "test_calls.py::test_the_calls_that_are_kept_have_a_bound",
    ),
    of(
        "calls", "a-shape-without-a-bound", "core/calls.py", "*_kept.get(key, ())][:_MOST_ALIKE]",
        "*_kept.get(key, ())]",
        "test_calls.py::test_calls_of_one_shape_have_a_bound",
    ),
    of(
        "calls", "masked-rows-left-out", "ops/softmax/softmax.py",
        "keep(launched, name, (dim, dtype, is_causal, masked_rows)", "keep(launched, name, (dim, dtype, is_causal)",
        "test_calls.py::test_a_repeated_call_decides_nothing[softmax, plain]",
    ),
    of(
        "calls", "a-scale-of-0-is-any-number", "ops/softmax/scores.py",
        'return "0" if scale == 0 else "1" if scale == 1 else "number"', 'return "1" if scale == 1 else "number"',
        "test_calls.py::test_calls_that_differ_in_their_scores_are_kept_apart",
    ),
    of(
        "calls", "any-class-is-ignored", "ops/losses/cross_entropy.py",
        "return (ignore_index, reduction, wanted) if plain", "return (reduction, wanted) if plain",
        "test_calls.py::test_losses_that_differ_are_kept_apart",
    ),
    of(
        "calls", "a-tensor-given-twice", "ops/losses/calls.py",
        "apart = None if dx is x else dx", "apart = dx",
        "test_calls.py::test_rows_whose_gradient_is_written_over_them_are_found",
    ),
    of(
        "calls", "lse-of-the-call-before", "ops/losses/given_lse.py",
        "launch(*picked(arranged(given, lse, rows.loss))",
        "launch(*picked(arranged(given, tensors[4], rows.loss))",
        "test_calls.py::test_a_repeated_call_decides_nothing[cross_entropy, given lse, mean]",
    ),
    of(
        "calls", "another-size-runs-the-old-one", "core/launch.py", "            scalars[i] = value",
        "            continue",
        "test_calls.py::test_a_call_of_other_rows_asks_the_planner_for_nothing_but_their_number",
    ),
    of(
        "calls", "another-size-of-another-kernel", "core/launch.py",
        "if _kind(value, fixed) != _kind(scalars[i], fixed):", "if False:",
        "test_launch.py::test_for_another_number_it_is_the_same_kernel_or_none",
    ),
    of(
        "calls", "a-float-that-vanishes", "core/launch.py",
        "math.copysign(_LEAST, value) if 0 < abs(value) < _LEAST else float(value)", "float(value)",
        "test_scores.py::test_a_number_that_vanishes_in_fp32_is_no_scale_of_0",
    ),
    of(
        "calls", "kernel-of-another-alignment", "core/launch.py",
        "return tensor.dtype, tensor.data_ptr() % 16 == 0", "return tensor.dtype",
        "test_launch.py::test_over_the_stub_driver", compiles=True,
    ),
    of(
        "calls", "kernel-of-another-width", "core/launch.py",
        "width = -(2**31) <= scalar < 2**31, scalar < 2**63", "width = -(2**31) <= scalar, scalar < 2**63",
        "test_launch.py::test_over_the_stub_driver", compiles=True,
    ),
    of(
        "calls", "a-float-that-is-truncated", "core/launcher.c",
        "float number = (float)given;", "float number = (float)(long)given;",
        "test_launch.py::test_over_the_stub_driver", compiles=True,
    ),
    of(
        "calls", "a-float-that-vanishes-in-c", "core/launcher.c", "if (number == 0 && given != 0)",
        "if (number != number)",
        "test_launch.py::test_over_the_stub_driver", compiles=True,
    ),
    of(
        "calls", "a-word-of-32-bits", "core/launcher.c",
        "*word = PyLong_AsUnsignedLongLongMask(value);", "*word = (uint32_t)PyLong_AsUnsignedLongLongMask(value);",
        "test_launch.py::test_over_the_stub_driver", compiles=True,
    ),
    of(
        "calls", "another-device-not-noticed", "core/launcher.c", "self->device, Py_NE);", "self->device, Py_LT);",
        "test_launch.py::test_over_the_stub_driver", compiles=True,
    ),
    of(
        "calls", "an-out-that-overlaps-in-a-kept-call", "ops/softmax/calls.py",
        "if overlaps(out, input, scale, mask, sink):", "if False:",
        "test_out_overlaps.py::test_a_kept_call_sees_that_out_overlaps_as_a_first_one_does",
    ),
    of(
        "calls", "an-out-that-overlaps-a-kept-logsumexp", "ops/softmax/calls.py",
        "if overlaps(out, input, scale, mask, sink):", "if False:",
        "test_out_overlaps.py::test_a_kept_call_sees_that_out_overlaps_a_scale_a_mask_or_a_sink",
    ),
    of(
        "calls", "an-out-after-what-is-read", "core/layout.py",
        "< place - read[i].data_ptr() < of_read:", "< place - read[i].data_ptr() < 1:",
        "test_out_overlaps.py::test_a_kept_call_sees_that_out_overlaps_as_a_first_one_does",
    ),
)  # fmt: skip

OPS = (
    of(
        "ops", "gradient-of-the-gradient", "ops/softmax/gradients.py",
        "return backward(dy, y, kind.dim, kind.input_dtype,", "return backward(y, dy, kind.dim, kind.input_dtype,",
        "test_backward.py::test_scores",
    ),
    of(
        "ops", "quick-gradient-of-the-gradient", "ops/softmax/gradients.py",
        "return call(dy, saved[0], ctx.number), None", "return call(saved[0], dy, ctx.number), None",
        "test_calls.py::test_a_repeated_call_decides_nothing[softmax, plain, gradient]",
    ),
    of(
        "ops", "a-kept-number-of-another-value", "ops/softmax/scores.py", "key = (value, dtype, device)",
        "key = (0.0, dtype, device)",
        "test_sink.py::test_a_kept_call_takes_the_numbers_and_values_of_each_call",
    ),
    of(
        "ops", "a-sink-gradient-of-the-other-sign", "ops/softmax/gradients.py",
        "return (-p * terms.sum(", "return (p * terms.sum(",
        "test_sink.py::test_gradients",
    ),
    of(
        "ops", "gradients-of-mask-and-scale-swapped", "ops/softmax/gradients.py",
        "    return dx, dmask, dscale, dsink\n", "    return dx, dscale, dmask, dsink\n",
        "test_backward.py::test_scores",
    ),
    of(
        "ops", "scale-not-in-the-gradient", "ops/softmax/gradients.py",
        "dx = (dz if in_kernel else dz * factor)", "dx = (dz if in_kernel else dz)", "test_backward.py::test_scores",
    ),
    of(
        "ops", "smoothing-with-the-wrong-sign", "ops/losses/kernels/common.py",
        "* loss + N.smoothing / n_classes * smoothed", "* loss - N.smoothing / n_classes * smoothed",
        "test_cross_entropy.py::test_losses_alone",
    ),
    of(
        "ops", "smoothing-not-in-the-gradient", "ops/losses/kernels/common.py", "dx -= u * w_cols", "dx -= u",
        "test_cross_entropy.py::test_gradient_by_a_second_read",
    ),
    of(
        "ops", "ignored-targets-counted", "ops/losses/kernels/gradient.py",
        "on = (row < stop) & (t != ignore_index)", "on = row < stop",
        "test_cross_entropy.py::test_totals_of_many_targets", "test_cross_entropy.py::test_public",
    ),
    of(
        "ops", "weights-not-in-the-mean", "ops/losses/kernels/gradient.py",
        "return tl.sum(weights, axis=0), n", "return n, n",
        "test_cross_entropy.py::test_totals_of_many_targets", "test_cross_entropy.py::test_public",
    ),
    of(
        "ops", "z-loss-by-the-weights", "ops/losses/kernels/common.py", "tl.load(totals_ptr + PARTS + j)",
        "tl.load(totals_ptr + j)",
        "test_cross_entropy.py::test_public",
    ),
    of(
        "ops", "mean-of-all-by-their-number", "ops/losses/kernels/common.py",
        "tl.load(totals_ptr + j), axis=0), 1.0", "tl.load(totals_ptr + PARTS + j), axis=0), 1.0",
        "test_cross_entropy.py::test_public",
    ),
    of(
        "ops", "z-loss-left-out", "ops/losses/kernels/gradient.py", "        result += z\n", "        result += 0.0\n",
        "test_cross_entropy.py::test_public",
    ),
    of(
        "ops", "z-loss-of-half-a-gradient", "ops/losses/kernels/common.py",
        "a + 2.0 * N.lse_square_scale", "a + N.lse_square_scale",
        "test_cross_entropy.py::test_gradient_by_a_second_read",
    ),
    of(
        "ops", "sum-as-mean", "ops/losses/options.py",
        'return self.reduction == "mean"', 'return self.reduction != "none"',
        "test_cross_entropy.py::test_public",
    ),
    of(
        "ops", "scale-lost-under-a-cap", "ops/losses/kernels/common.py", "slope *= (N.cap", "slope = (N.cap",
        "test_cross_entropy.py::test_gradient_by_a_second_read", "test_losses_fuzz.py::test_any_rows_by_any_strategy",
    ),
    of(
        "ops", "causal-by-the-keys", "ops/softmax/scores.py",
        "n_queries = shape[-2] if scores.is_causal", "n_queries = shape[-1] if scores.is_causal",
        "test_scores.py::test_causal",
    ),
    of(
        "ops", "masked-rows-are-nan", "ops/softmax/scores.py", 'scores.masked_rows == "zero"', "False",
        "test_scores.py::test_special_values", "test_backward.py::test_scores",
    ),
    of(
        "ops", "write-in-place-unseen", "ops/losses/overwritten.py", "    claim.bump()\n    if", "    if",
        "test_loss_defects.py::test_what_kept_the_logits_says_that_they_were_overwritten",
    ),
    of(
        "ops", "view-of-a-leaf-overwritten", "ops/losses/overwritten.py",
        "base.is_leaf and base.requires_grad", "base.is_leaf and not base.requires_grad",
        "test_cross_entropy.py::test_inplace_backward_takes_the_logits_memory",
    ),
    of(
        "ops", "one-memory-for-two-losses", "ops/losses/overwritten.py", "version == now and place.meets(given)",
        "False",
        "test_losses_seams.py::test_a_second_loss_over_the_same_logits_raises",
    ),
    of(
        "ops", "one-memory-for-no-two-columns", "ops/losses/overwritten.py", "if self.step != other.step:", "if True:",
        "test_losses_seams.py::test_losses_over_other_parts_of_one_memory_do_not_disturb_each_other",
    ),
    of(
        "ops", "gradient-of-a-view-unchecked", "ops/losses/overwritten.py",
        "if self._base._version - self._memory.ours != self._others:", "if False:",
        "test_losses_seams.py::test_a_view_whose_memory_was_written_to_since_raises",
    ),
    of(
        "ops", "ignored-nan-by-torchs-loss", "ops/losses/cross_entropy.py",
        "_spared(input, target, ignore_index), target,",
        "input, target,",
        "test_losses_seams.py::test_ignored_rows_have_a_gradient_of_0_whatever_they_contain",
    ),
    of(
        "ops", "ignored-nan-by-operations", "ops/losses/reference.py",
        "(counts | known.isfinite()).unsqueeze(-1), z, 0.0",
        "(counts | True).unsqueeze(-1), z, 0.0",
        "test_losses_seams.py::test_ignored_rows_have_a_gradient_of_0_whatever_they_contain",
    ),
    of(
        "ops", "ignored-nan-of-a-given-lse", "ops/losses/reference.py", "(counts.unsqueeze(-1), z), (counts, lse)",
        "(counts.unsqueeze(-1) | True, z), (counts, lse)",
        "test_losses_seams.py::test_ignored_rows_of_a_given_lse",
    ),
    of(
        "ops", "ignored-nan-in-the-layers-weight", "ops/losses/linear_by_rows.py",
        "rows if self.left_out is None else", "rows if self.left_out is not None else",
        "test_losses_seams.py::test_ignored_rows_of_a_linear_layer_have_no_part_in_any_gradient",
    ),
    of(
        "ops", "ignored-nan-by-classes", "ops/losses/linear_by_classes.py",
        "rows = without(x, left_out_of(target, loss))",
        "rows = x",
        "test_losses_seams.py::test_ignored_tokens_of_blocks_of_classes_have_no_part_in_any_gradient",
    ),
    of(
        "ops", "ignored-nan-in-whole-logits", "ops/losses/linear_by_rows.py", "linear(without(x, spoilt), w, bias)",
        "linear(x, w, bias)",
        "test_losses_seams.py::test_ignored_rows_of_a_linear_layer_have_no_part_in_any_gradient",
    ),
    of(
        "ops", "learnt-class-weights", "ops/losses/options.py", "weight.requires_grad and torch.is_grad_enabled()",
        "False",
        "test_losses_seams.py::test_class_weights_that_require_a_gradient_raise",
    ),
    of(
        "ops", "a-z-loss-of-0-times-infinity", "ops/losses/reference.py",
        "loss, loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)", "loss, z_loss",
        "test_losses_seams.py::test_a_z_loss_of_scale_0_is_0_and_of_nan_is_nan",
    ),
    of(
        "ops", "changed-logits-unnamed", "core/no_gradient.py", '"modified by an inplace operation" not in str(error)',
        "True",
        "test_losses_seams.py::test_logits_changed_in_place_give_torchs_gradient_or_an_error_that_names_the_loss",
    ),
    of(
        "ops", "neg-bit-of-a-gradient", "core/route.py", "each is not None and each.is_neg()", "each is None",
        "test_neg_bit.py::test_a_gradient_with_the_bit",
    ),
    of(
        "ops", "neg-bit-of-a-saved-tensor", "core/no_gradient.py", "return resolved(*saved)", "return saved",
        "test_neg_bit.py::test_saved_tensors_with_the_bit",
    ),
    of(
        "ops", "statistics-without-a-word", "core/no_gradient.py",
        "        if gradient is not None:\n            raise RuntimeError(says",
        "        if gradient is None and False:\n            raise RuntimeError(says",
        "test_no_gradient.py::test_a_backward_pass_through_token_stats_raises_and_names_what_has_a_gradient",
    ),
    of(
        "ops", "chunks-of-probabilities", "ops/losses/linear_cross_entropy.py",
        "if chunk_size is not None and target.is_floating_point():", "if False:",
        "test_losses_seams.py::test_chunks_of_probabilities_are_refused",
    ),
    of(
        "ops", "upstream-gradient-left-out", "ops/losses/steps.py", "ctx.multiply(dx, dy)", "ctx.multiply",
        "test_cross_entropy.py::test_public",
    ),
    of(
        "ops", "a-second-backward-of-what-was-given", "ops/losses/steps.py",
        "dx, ctx.dx = ctx.dx, None",
        "dx = ctx.dx",
        "test_cross_entropy.py::test_a_second_backward_and_a_changed_first_gradient",
    ),
    of(
        "ops", "second-backward-by-other-launches", "ops/losses/steps.py",
        "with torch.enable_grad():", "with torch.no_grad():",
        "test_cross_entropy.py::test_a_second_backward_has_the_bits_of_the_first",
    ),
    of(
        "ops", "class-weights-without-their-version", "ops/losses/steps.py",
        "rows.m, rows.ls, loss.weight)", "rows.m, rows.ls, None)",
        "test_cross_entropy.py::test_class_weights_that_were_changed_before_they_are_read_again",
    ),
    of(
        "ops", "saved-logits-as-they-come", "ops/losses/steps.py",
        "        x = x.contiguous()\n    target", "        pass\n    target",
        "test_cross_entropy.py::test_saved_tensors_that_a_hook_lays_out_anew",
    ),
    of(
        "ops", "bias-of-the-first-chunk", "ops/losses/linear_by_rows.py",
        "db if self.db is None else self.db.add_(db)", "db if self.db is None else self.db",
        "test_linear_cross_entropy.py::test_loss_and_gradients_by_chunks",
    ),
    of(
        "ops", "chunks-of-other-parts", "ops/losses/linear_by_rows.py",
        "if len({rows.loss.shape[1] for rows in found}) > 1:", "if not found:",
        "test_linear_cross_entropy.py::test_a_short_last_chunk_whose_rows_are_split_otherwise",
    ),
    of(
        "ops", "lse-of-rows-left-out", "ops/losses/linear_cross_entropy.py",
        "of_kept.new_zeros(n).index_put", "of_kept.new_ones(n).index_put",
        "test_linear_outputs.py::test_rows_that_do_not_count_and_their_gradients",
    ),
    of(
        "ops", "gradient-of-lse-left-out", "ops/losses/linear_cross_entropy.py",
        "alone = dlse is None and dz is None", "alone = True",
        "test_linear_outputs.py::test_by_rows",
    ),
    of(
        "ops", "given-lse-with-a-sum", "ops/losses/steps.py",
        "torch.zeros_like(m) if ls is None else ls", "torch.ones_like(m) if ls is None else ls",
        "test_loss_given_lse.py::test_loss_and_gradient",
    ),
    of(
        "ops", "given-lse-made-anew", "ops/losses/reference.py",
        "(of_rows + (p - p.detach()).sum(-1))", "(of_rows + p.sum(-1))",
        "test_loss_given_lse.py::test_the_reference_is_the_formula",
    ),
    of(
        "ops", "a-scale-of-32-bits", "ops/softmax/scores.py", "or dtype != torch.float64:\n            return scores",
        "or True:\n            return scores",
        "test_scores.py::test_a_number_in_fp64_has_64_bits",
    ),
    of(
        "ops", "lse-rounded-in-the-gradient", "ops/softmax/kernels/logsumexp.py",
        "tl.load(lse_ptr + r.row).to(K.state_dtype), tl",
        "tl.load(lse_ptr + r.row).to(K.cast_dtype).to(K.state_dtype), tl",
        "test_logsumexp_gradients.py::test_gradients_along_any_dims",
    ),
    of(
        "ops", "lse-rounded-by-the-operator", "ops/softmax/logsumexp.py",
        "if lse.dtype.itemsize < arithmetic.itemsize:", "if False:",
        "test_logsumexp_gradients.py::test_gradients_take_an_lse_of_32_bits",
    ),
    of(
        "ops", "torchs-own-lse-of-16-bits", "ops/softmax/logsumexp.py",
        "elif plain and (out is not None or input.dtype not in (torch.float16, torch.bfloat16)):", "elif plain:",
        "test_logsumexp_gradients.py::test_transforms_and_batched_gradients",
    ),
    of(
        "ops", "a-maximum-that-moves-with-a-scale-of-0", "ops/softmax/logsumexp.py",
        "dscale.masked_fill(scale.to(dscale.device) == 0, 0.0).to(scale.dtype)", "dscale.to(scale.dtype)",
        "test_logsumexp_gradients.py::test_gradients_take_an_lse_of_32_bits",
    ),
    of(
        "ops", "a-number-that-no-compiler-traces", "ops/losses/options.py",
        "not -math.inf < value < math.inf:", "not math.isfinite(value):",
        "test_compiled_options.py::test_a_number_that_changes_breaks_no_graph",
    ),
    of(
        "ops", "an-out-resized-in-vain", "core/checks.py",
        "return out if out.shape == shape else out.resize_(shape)", "return out.resize_(shape)",
        "test_compiled_options.py::test_out_breaks_no_graph",
    ),
    of(
        "ops", "a-causal-bias-read-as-floats", "ops/attention/attention.py",
        "if is_causal_bias(attn_mask) or is_causal_bias(bias):", "if False:",
        "test_compiled_options.py::test_a_causal_bias_gives_torchs_result",
    ),
    of(
        "ops", "a-causal-bias-of-the-other-corner", "ops/attention/options.py",
        'align = "bottom_right" if mask.variant.name == "LOWER_RIGHT" else "top_left"', 'align = "top_left"',
        "test_compiled_options.py::test_a_causal_bias_gives_torchs_result",
    ),
    of(
        "ops", "a-causal-bias-that-aligns-a-window", "ops/attention/options.py",
        "if aligned or (window is None and beside.alibi_slopes is None):", "if True:",
        "test_compiled_options.py::test_a_causal_bias_beside_what_is_aligned_as_causality_is",
    ),
    of(
        "ops", "a-dense-causal-bias-of-the-other-corner", "core/checks.py",
        'mask.seq_len_kv - mask.seq_len_q if mask.variant.name == "LOWER_RIGHT" else 0', "0",
        "test_compiled_options.py::test_a_causal_bias_masks_a_softmax",
    ),
    of(
        "ops", "a-mask-made-on-demand", "core/checks.py",
        'if isinstance(mask, Tensor) and (hasattr(mask, "materialize") or hasattr(mask, "_materialize")):', "if False:",
        "test_compiled_options.py::test_masks_that_are_made_on_demand_are_refused",
    ),
)  # fmt: skip

REGISTER = (
    of(
        "register", "stand-in-for-any-smoothing", "register/patch.py",
        "in_range = 0.0 <= label_smoothing <= 1.0", "in_range = True",
        "test_patch.py::test_a_loss_that_was_kept_is_not_found_for_a_smoothing_out_of_range",
    ),
    of(
        "register", "fake-of-the-inputs-dtype", "core/one_dim.py",
        "return input.new_empty(input.shape, dtype=dtype)", "return input.new_empty(input.shape)",
        "test_operators.py::test_what_runs_and_its_fake_agree",
    ),
    of(
        "register", "fake-gradient-of-the-outputs-dtype", "core/one_dim.py",
        "return y.new_empty(y.shape, dtype=dtype)", "return y.new_empty(y.shape)",
        "test_operators.py::test_what_runs_and_its_fake_agree",
    ),
    of(
        "register", "fake-states-of-the-logits-dtype", "ops/losses/operators.py",
        "input.new_empty([n], dtype=arithmetic_of(input))", "input.new_empty([n])",
        "test_operators.py::test_fakes_of_losses_of_half_precision",
    ),
    of(
        "register", "vmap-along-the-dim-before", "core/one_dim.py",
        "operator(input, dim % (input.ndim - 1) + 1, *rest)", "operator(input, dim % (input.ndim - 1), *rest)",
        "test_operators.py::test_vmap",
    ),
    of(
        "register", "vmap-of-a-gradient-along-the-dim-before", "core/one_dim.py",
        "operator(dy, y, dim % (y.ndim - 1) + 1, *rest)", "operator(dy, y, dim % (y.ndim - 1), *rest)",
        "test_operators.py::test_vmap",
    ),
    of(
        "register", "vmap-of-a-mask-by-its-last-dims", "ops/softmax/operators.py",
        "*[1] * (ndim - tensor.ndim), *tensor.shape[1:])", "*tensor.shape[1:], *[1] * (ndim - tensor.ndim))",
        "test_library.py::test_vmap_of_scales_and_masks",
    ),
    of(
        "register", "half-to-float-of-bf16", "register/patch.py",
        "if half_to_float and x.dtype != torch.float16:", "if False:",
        "test_patch.py::test_errors_are_torchs[not halves to float]",
    ),
    of(
        "register", "reductions-swapped", "register/patch.py",
        '("none", "mean", "sum")[reduction]',
        '("none", "sum", "mean")[reduction]',
        "test_patch.py::test_cross_entropy_is_taken",
    ),
    of(
        "register", "enabled-for-ever", "register/patch.py",
        "if not any(_asked) and (_depth == 0", "if False and (_depth == 0",
        "test_patch.py::test_atens_kernels_are_back_afterwards",
    ),
    of(
        "register", "second-derivative-of-softmax", "ops/softmax/operators.py",
        "g * (dy - d) - c * dy", "g * (dy - d) + c * dy",
        "test_library.py::test_the_gradients_and_their_derivatives",
    ),
    of(
        "register", "second-derivative-of-log-softmax", "ops/softmax/operators.py",
        "-weighted * dy.sum", "weighted * dy.sum",
        "test_library.py::test_the_gradients_and_their_derivatives",
    ),
    of(
        "register", "gradients-of-scale-and-mask-swapped", "ops/softmax/operators.py",
        "_PLACES = 5, 4, 9", "_PLACES = 4, 5, 9",
        "test_library.py::test_gradients_of_scale_and_mask_in_compiled_code",
    ),
    of(
        "register", "learnt-class-weights-under-enable", "register/patch.py",
        "if weight is not None and needs_grad(weight):", "if False:",
        "test_losses_seams.py::test_class_weights_that_require_a_gradient_raise",
    ),
    of(
        "register", "statistics-without-a-word-in-compiled-code", "core/no_gradient_operator.py",
        "            raise RuntimeError(message)", "            pass",
        "test_no_gradient.py::test_a_backward_pass_through_token_stats_raises_and_names_what_has_a_gradient",
    ),
    of(
        "register", "composed-gradient-at-the-target", "ops/losses/operators.py", "-b.unsqueeze(-1)", "b.unsqueeze(-1)",
        "test_library_losses.py::test_where_there_are_no_kernels_they_are_made_of_torchs_operations",
    ),
    of(
        "register", "gradients-at-once-of-the-loss-alone", "ops/losses/operators.py",
        "elif alone and ctx.at_once and all(", "elif ctx.at_once and all(",
        "test_linear_outputs.py::test_compiled_it_is_one_operator",
    ),
    of(
        "register", "gradients-of-half-precision-at-once", "ops/losses/operators.py",
        'reduction != "none" and x.dtype != torch.float16 for', 'reduction != "none" for',
        "test_library_losses.py::test_linear_makes_the_gradients_that_are_asked_for",
        "test_library_losses.py::test_linear_compiled",
    ),
    of(
        "register", "flops-of-the-logits-left-out", "ops/losses/operators.py", "* (1 + made)", "* made",
        "test_flops.py::test_a_linear_loss_counts_what_its_layer_does",
    ),
    of(
        "register", "flops-of-scores-that-are-made-again-left-out", "ops/attention/operators.py",
        "dim * (1 + of_query + of_key)", "dim * (of_query + of_key)",
        "test_flops.py::test_attention_counts_what_torchs_formulas_do",
    ),
    of(
        "register", "flops-of-gradients-that-nobody-asks-for", "ops/attention/operators.py",
        "value_dim * (of_weights + of_value)", "value_dim * 2",
        "test_flops.py::test_attention_counts_the_gradients_that_are_asked_for",
    ),
    of(
        "register", "counter-that-was-there-first-counts-nothing", "register/library.py",
        "for mode in _get_current_dispatch_mode_stack():", "for mode in _get_current_dispatch_mode_stack()[:0]:",
        "test_flops.py::test_a_counter_that_was_there_first_counts_too",
    ),
    of(
        "register", "operator-that-autocast-casts", "register/library.py",
        "with torch._C._DisableAutocast():", "with torch.no_grad():",
        "test_autocast.py::test_an_operator_computes_in_the_dtypes_that_it_is_given",
    ),
)  # fmt: skip

AUTOCAST = (
    of(
        "ops", "softmax-cast-on-a-cpu", "ops/autocast.py",
        '"softmax": Rule(("cuda",),', '"softmax": Rule(_EVERYWHERE,',
        "test_autocast.py::test_results_and_gradients_have_torchs_dtypes",
    ),
    of(
        "ops", "losses-not-cast-on-a-cpu", "ops/autocast.py",
        '"cross_entropy": Rule(_EVERYWHERE, result', '"cross_entropy": Rule(("cuda",), result',
        "test_autocast.py::test_options_that_torch_lacks_change_no_dtype",
    ),
    of(
        "ops", "attention-not-cast-on-a-cpu", "ops/autocast.py",
        '"attention": Rule(_EVERYWHERE', '"attention": Rule(("cuda",)',
        "test_autocast.py::test_results_and_gradients_have_torchs_dtypes",
    ),
    of(
        "ops", "float64-is-cast", "ops/autocast.py", "and each.dtype != torch.float64 for", "for",
        "test_autocast.py::test_results_and_gradients_have_torchs_dtypes",
    ),
    of(
        "ops", "composed-operations-are-cast", "ops/autocast.py",
        "return torch.autocast(device, enabled=False)", "return nullcontext()",
        "test_autocast.py::test_a_second_derivative_within_autocast_keeps_its_arithmetic",
    ),
    of(
        "ops", "products-of-a-backward-pass-are-cast", "ops/losses/linear_by_classes.py",
        "return torch.mm(a, b, out=torch.empty(len(a), b.shape[1], dtype=dtype, device=a.device), **wide)",
        "return torch.mm(a, b, **wide)",
        "test_autocast.py::test_a_backward_pass_within_autocast_keeps_its_arithmetic",
    ),
    of(
        "ops", "kept-attention-of-another-autocast", "ops/attention/attention.py",
        "attention_sdpa.switch(), cast,", "attention_sdpa.switch(),",
        "test_autocast.py::test_kept_calls_of_other_autocasts_are_kept_apart",
    ),
    of(
        "ops", "plain-guard-without-cpu-autocast", "core/calls.py", 'torch.is_autocast_enabled("cpu"), ', "",
        "test_autocast.py::test_kept_calls_of_other_autocasts_are_kept_apart",
    ),
    of(
        "ops", "attention-refuses-what-autocast-makes-alike", "ops/attention/options.py",
        "and (cast is None or tensor.dtype == torch.float64)", "",
        "test_autocast.py::test_a_mix_of_dtypes_that_autocast_makes_one_is_taken",
    ),
    of(
        "ops", "enabled-loss-in-half", "ops/losses/cross_entropy.py",
        'Wanted(), autocast.result_dtype("cross_entropy", input), False', "Wanted(), input.dtype, False",
        "test_autocast.py::test_torchs_cross_entropy_under_enable_where_autocast_has_not_cast_it",
    ),
    of(
        "ops", "enabled-loss-of-a-dtensor-in-half", "ops/losses/over_ranks/dtensor.py",
        'Wanted(), result_dtype("cross_entropy", x))', "Wanted(), x.dtype)",
        "test_autocast.py::test_over_ranks_results_have_the_same_dtypes",
    ),
    of(
        "ops", "loss-of-probabilities-rounded", "ops/losses/cross_entropy.py",
        "if dtype is None and target.is_floating_point() else found", "if False else found",
        "test_autocast.py::test_a_loss_of_probabilities_is_as_wide_as_they_are",
    ),
    of(
        "ops", "logsumexp-in-half", "ops/softmax/logsumexp.py",
        'dtype = input.dtype if out is not None else autocast.result_dtype("logsumexp", input)', "dtype = input.dtype",
        "test_autocast.py::test_results_and_gradients_have_torchs_dtypes",
    ),
    of(
        "ops", "logsumexp-over-a-group-in-half", "ops/softmax/logsumexp.py",
        "    dtype = autocast.result_dtype(name, input)", "    dtype = input.dtype",
        "test_autocast.py::test_over_ranks_results_have_the_same_dtypes",
    ),
)  # fmt: skip

EXPLAIN = (
    of(
        "route", "a-default-device-watches", "core/route.py", "if type(mode) is not DeviceContext), None)",
        "if True), None)",
        "test_modes.py::test_a_default_device_keeps_kernels_and_results",
    ),
    of(
        "route", "no-mode-of-functions-watches", "core/route.py", "if type(mode) is not DeviceContext), None)",
        "if False), None)",
        "test_modes.py::test_another_mode_beside_a_default_device_is_seen",
    ),
    of(
        "route", "kept-calls-beside-another-mode", "core/calls.py",
        "if function_mode() is not None:\n        return None",
        "if False:\n        return None",
        "test_modes.py::test_another_mode_beside_a_default_device_is_seen",
    ),
    of(
        "route", "nothing-is-found-under-a-default-device", "core/calls.py", "return call and _unseen(call)",
        "return None",
        "test_modes.py::test_under_a_default_device_a_kept_call_is_found",
    ),
    of(
        "route", "memory-where-factories-allocate", "core/runner.py",
        'slots_per_group, dtype=torch.int64, device="cpu")', "slots_per_group, dtype=torch.int64)",
        "test_modes.py::test_every_factory_function_says_its_device",
    ),
    of(
        "route", "a-parameter-is-no-tensor", "core/route.py",
        "return kind is Tensor or kind is torch.nn.Parameter or _adds_no_rule(kind)", "return kind is Tensor",
        "test_modes.py::test_parameters_and_buffers_keep_the_kernels",
    ),
    of(
        "route", "a-subclass-without-its-say", "core/route.py",
        'of_functions = getattr(kind, "__torch_function__", None) is torch._C._disabled_torch_function_impl',
        "of_functions = True",
        "test_modes.py::test_a_subclass_with_rules_of_its_own_gets_its_say",
    ),
    of(
        "route", "a-warning-at-every-call", "core/route.py", "_said.add((name, reason))", "pass",
        "test_modes.py::test_a_mode_that_costs_memory_is_named_once",
    ),
    of(
        "route", "a-warning-without-kernels", "core/route.py", "and holds and on_device(tensors[0]):", "and holds:",
        "test_modes.py::test_nothing_is_said_where_there_are_no_kernels_or_no_memory_is_taken",
    ),
    of(
        "route", "a-reason-that-is-another", "core/route.py", "*(untraced or watcher))", "*watcher)",
        "test_explanation.py::test_what_keeps_a_call_from_the_kernels",
    ),
    of(
        "explain", "kept-calls-go-unheard", "explanation.py",
        "    _replace(calls, \"_is_compiling\", _found_nothing)\n", "",
        "test_explanation.py::test_every_function_is_listed_whether_it_was_kept_or_not",
    ),
    of(
        "explain", "listeners-left-behind", "explanation.py", "while _replaced and not _listening:", "while False:",
        "test_explanation.py::test_nothing_is_left_behind",
    ),
    of(
        "explain", "a-launch-without-its-plan", "explanation.py", "if plan is not None and plan not in record.plan:",
        "if False:",
        "test_explanation.py::test_a_call_of_the_kernels",
    ),
    of(
        "explain", "threads-in-one-call", "explanation.py", "class _Of(threading.local):", "class _Of:",
        "test_explanation.py::test_all_threads_are_heard_each_with_its_own_calls",
    ),
    of(
        "explain", "a-cache-hit-compiles", "explanation.py", "if now is not None and not cache_hit:",
        "if now is not None:",
        "test_explanation.py::test_what_triton_says_of_compiling_is_the_calls_that_compiles",
    ),
    of(
        "explain", "a-pass-of-cudnns-by-the-kernels", "explanation.py", "if choice.way.name == CUDNN:", "if False:",
        "test_explanation.py::test_a_pass_that_is_handed_to_cudnn",
    ),
    of(
        "explain", "no-word-of-the-ways", "explanation.py", "now.record.ways = *now.record.ways,", "_ =",
        "test_attention_ways.py::test_explain_says_which_way_and_why",
    ),
)  # fmt: skip
