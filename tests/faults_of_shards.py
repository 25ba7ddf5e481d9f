"""Faults of rows over several GPUs: of the messages of peers, of who waits for whom, and of what ranks know."""

from fault import of

MESSAGES, LOSS, GATHER = "ranks/kernels.py", "ops/losses/kernels/peers.py", "ranks/kernels.py"
SOFTMAX, LOSSES, MEMORY = "ops/softmax/kernels/peers.py", "ops/losses/over_ranks/peers.py", "ranks/peers.py"
STEPS, KEPT = "ops/losses/over_ranks/steps.py", "test_shards_kept.py::test_calls_that_differ_in_one_thing_take_turns"
GONE = "test_shards_losses.py::test_logits_that_are_gone_make_no_second_gradient"
RANKS, NUMBERS, GRADIENT = "ranks/groups.py", "ops/losses/kernels/over_ranks.py", "ops/softmax/over_ranks.py"
SOFTMAXES, OF_ONE = (
    "test_peers.py::test_softmaxes_are_those_of_one_process", "test_peers.py::test_losses_are_those_of_one_process",
)  # fmt: skip
GATHERED = "test_peers_gathered.py::test_losses_are_those_of_one_process"
PADDING, LATE = (
    "test_peers.py::test_columns_past_n_classes_are_padding", "test_peers_waits.py::test_a_late_rank_is_waited_for",
)  # fmt: skip
ABSENT = "test_peers_waits.py::test_a_rank_that_never_comes_gives_nan_and_then_an_error_until_it_does"
AT_ODDS = "test_peers_waits.py::test_ranks_that_differ_get_nan_at_once_then_an_error_and_then_what_they_ask_for"
HINDERED = "test_peers_waits.py::test_what_keeps_a_group_from_peers"
COLLECTED = "test_shards_by_kernels.py::test_losses_of_uneven_shards_of_which_one_is_empty"
IN_PARTS = "test_shards_by_kernels.py::test_gradients_of_softmax_in_one_part_and_in_several"
DTENSORS, ATTENTION = "ranks/dtensor.py", "test_shards_of_calls.py::test_attention_of_shards_is_that_of_whole_tensors"
SCORED = "test_shards_fsdp.py::test_scales_masks_and_sinks_go_where_the_input_lies"
COMPARED = "test_shards_misuse.py::test_what_is_not_compared_beforehand_gives_nan_and_then_an_error"

SHARDS = (
    of(
        "shards", "tag-of-the-launch-before", MESSAGES, "tag = 1 - tl.where(turn == 0, first, second)",
        "tag = tl.where(turn == 0, first, second)", LATE,
    ),
    of("shards", "one-set-of-slots", MESSAGES, "return turn * set_size, tag", "return turn * 0, tag", LATE),
    of(
        "shards", "set-of-the-next-launch", MESSAGES, "turn = 1 - (first ^ second)", "turn = first ^ second", SOFTMAXES,
    ),
    of(
        "shards", "old-messages-are-new", MESSAGES, "((1 - tag) << 31)", "(tag << 31)", SOFTMAXES,
    ),
    of(
        "shards", "waits-as-long-again", MESSAGES, "limit = tl.where(word == 0, limit, 0)", "limit = limit + 0 * word",
        "test_peers_waits.py::test_who_has_given_up_once_waits_no_more",
    ),
    of("shards", "header-of-the-first-rank-lost", MESSAGES, "(j >= n_states) &", "(j > n_states) &", OF_ONE),
    of(
        "shards", "headers-merged-as-states", MESSAGES, "merged(message, n_states, K)",
        "merged(message, n_states + ranks, K)",
        OF_ONE,
    ),
    of(
        "shards", "other-options-are-fine", MESSAGES, "wrong = missing | (heads & ((message & DIGEST) != digest))",
        "wrong = missing", AT_ODDS,
    ),
    of(
        "shards", "rank-of-a-header-by-its-parts", MESSAGES,
        "tl.where(first < n_states, first // n_parts, first - n_states)",
        "first // n_parts", AT_ODDS,
    ),
    of(
        "shards", "who-was-late-has-differed", MESSAGES, "tl.where(lost > 0, MISSING, DIFFERENT)",
        "tl.where(lost > 0, DIFFERENT, MISSING)", ABSENT,
    ),
    of("shards", "a-missing-part-counts-nothing", MESSAGES, '        s = s + float("nan")\n', "", ABSENT),
    of(
        "shards", "parts-before-ranks", MESSAGES, "row_at + rank * n_parts + part, pack",
        "row_at + part * ranks + rank, pack",
        SOFTMAXES,
    ),
    of("shards", "target-by-the-first-shard", LOSS, "t = T.t - first", "t = T.t", OF_ONE),
    of("shards", "target-of-the-next-shard", LOSS, "(t >= 0) & (t < n_cols)", "(t >= 0) & (t <= n_cols)", OF_ONE),
    of(
        "shards", "target-after-the-body-of-the-first-part", LOSS, "K), 0), n_parts - 1)", "K), 0), 0)",
        OF_ONE, "test_peers.py::test_shards_that_lie_in_other_ways",
    ),
    of("shards", "target-of-the-first-part", LOSS, "part == tl.where(here, owner, 0)", "part == 0", OF_ONE),
    of("shards", "own-target-for-a-loss", LOSS, "part >= 0, m, ls, logit,", "part >= 0, m, ls, z_t,", OF_ONE),
    of("shards", "loss-by-its-own-maximum", LOSS, "m, s, logit = state_of(", "_, s, logit = state_of(", OF_ONE),
    of(
        "shards", "gradient-of-a-target-that-is-no-class", LOSS, "if T.kept | T.wrong:", "if T.kept:",
        "test_peers.py::test_rows_that_do_not_count_and_a_target_that_is_no_class",
    ),
    of("shards", "softmax-by-its-own-maximum", SOFTMAX, "m, s, _ = state_of(", "_, s, _ = state_of(", SOFTMAXES),
    of("shards", "softmax-of-its-own-sum", SOFTMAX, "m, s, _ = state_of(", "m, _, _ = state_of(", SOFTMAXES),
    of(
        "shards", "words-that-differ-are-heard", GATHER, "tl.where(wrong, -1,", "tl.where(missing, -1,",
        "test_peers_gathered.py::test_what_a_rank_does_not_say_is_nan_and_then_an_error",
    ),
    of("shards", "words-by-rows", GATHER, "heard_ptr += n\n", "heard_ptr += n_rows\n", GATHERED),
    of(
        "shards", "smoothing-by-one-launch", LOSSES, "loss.weight is not None or loss.smooth or",
        "loss.weight is not None or",
        GATHERED,
    ),
    of("shards", "weights-by-one-launch", LOSSES, "if loss.weight is not None or", "if", GATHERED),
    of(
        "shards", "z-loss-left-out-of-one-launch", LOSSES, " and not loss.lse_square_scale\n", "\n",
        f"{OF_ONE}[z-loss alone-2]",
    ),
    of(
        "shards", "small-gradients-before-their-factor", LOSSES, "(input.dtype == torch.float16 or inplace)", "inplace",
        "test_peers.py::test_dtypes_of_losses[mean-torch.float16-128]",
    ),
    of(
        "shards", "call-of-other-classes", "ops/losses/cross_entropy.py",
        "is_grad_enabled(), n_classes, shard_sizes, transport", "is_grad_enabled(), shard_sizes, transport",
        "test_peers.py::test_calls_of_other_classes_take_turns",
    ),
    of(
        "shards", "padding-keeps-its-logits", LOSSES,
        "dx[:, kind.held :] = 0  # padding", "pass", PADDING,
    ),
    of(
        "shards", "more-targets-than-are-counted", LOSSES,
        "(n <= WHOLE[-1] and (not counts or counted_by_each(n) == counted_by_each(n_rows)))", "n <= WHOLE[-1]",
        "test_peers.py::test_calls_for_other_numbers_of_rows",
    ),
    of(
        "shards", "a-gradient-given-away-twice", LOSSES, "dx, ctx.dx = ctx.dx, None", "dx = ctx.dx",
        "test_peers.py::test_a_second_backward_and_no_second_derivative",
    ),
    of(
        "shards", "ignored-class-not-compared", LOSSES,
        "of_loss = loss.ignore_index, loss.reduction,", "of_loss = loss.reduction,",
        AT_ODDS,
    ),
    of(
        "shards", "padding-of-a-logarithm", "ops/softmax/by_peers.py",
        "value=-torch.inf if log else 0.0", "value=0.0", PADDING,
    ),
    of(
        "shards", "row-of-a-word-with-its-rank", MEMORY, "word >> 16, (word >> 2)", "word >> 14, (word >> 2)", ABSENT,
    ),
    of(
        "shards", "slots-of-the-first-rows", MEMORY, "found is None or found.rows < n_rows:", "found is None:",
        "test_peers.py::test_launches_over_changing_shapes",
    ),
    of(
        "shards", "cpus-by-peers-unasked", MEMORY, 'or (transport is None and device.type != "cuda"):', "or False:",
        "test_peers_waits.py::test_cpu_ranks_talk_by_a_collective_unless_asked",
    ),
    of(
        "shards", "memory-of-those-who-can", MEMORY, "        if failed:", "        if len(failed) > 1:",
        "test_peers_waits.py::test_memory_that_one_rank_cannot_map_is_nobodys",
    ),
    of("shards", "several-hosts", MEMORY, "if len(set(hosts)) > 1:", "if len(set(hosts)) > 2:", HINDERED),
    of(
        "shards", "two-ranks-on-a-gpu", MEMORY, "len(said) > len({each[2] for each in said})",
        "len({each[2] for each in said}) == 1", HINDERED,
    ),
    of(
        "shards", "first-column-after-its-own", RANKS, "sum(self.sizes[: self.rank])",
        "sum(self.sizes[: self.rank + 1])",
        "test_shards_losses.py::test_losses_are_those_of_one_process",
    ),
    of(
        "shards", "columns-of-the-next-rank-count", RANKS, "self.n_classes - end + size)", "self.n_classes - end)",
        "test_shards_losses.py::test_columns_past_n_classes_are_padding",
    ),
    of(
        "shards", "answers-to-other-questions", RANKS,
        '.masked_fill((headers != expected.there).any(), float("nan"))', "",
        COMPARED,
    ),
    of(
        "shards", "sizes-that-are-given", RANKS, "(columns,) * ranks if given is None else given", "(columns,) * ranks",
        "test_shards_misuse.py::test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all",
    ),
    of(
        "shards", "uneven-shards-pass", RANKS, 'if said["shard_sizes"] is None and len(set(columns)) > 1:', "if False:",
        "test_shards_misuse.py::test_uneven_shards_without_their_sizes",
    ),
    of(
        "shards", "a-rank-refuses-alone", RANKS, "            _refuse(*self._of, error)\n", "            pass\n",
        "test_shards_misuse.py::test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all",
    ),
    of(
        "shards", "what-was-not-sent-is-the-same", RANKS, "zlib.crc32(text.partition", "0 * zlib.crc32(text.partition",
        "test_shards_misuse.py::test_what_is_not_sent_is_compared_too",
    ),
    of(
        "shards", "a-scale-is-a-scale", "ops/softmax/over_ranks.py",
        '"a tensor" if isinstance(each, Tensor) else each for', "each is not None for",
        "test_shards_misuse.py::test_values_of_scales_and_sinks_are_compared",
    ),
    of("shards", "numbers-not-compared", "ranks/launches.py", "digest ^ hash(given) & _DIGEST", "digest", AT_ODDS),
    of("shards", "another-launch-is-waited-for", MESSAGES, "(asked >> 32) == (own >> 32)", "rank < 0", AT_ODDS),
    of("shards", "who-refuses-is-waited-for", MESSAGES, "odd = (asked < 0) | ", "odd = ", AT_ODDS),
    of(
        "shards", "slots-as-they-were-left", MEMORY, "            region.slots.zero_()\n", "            pass\n",
        AT_ODDS,
    ),
    of(
        "shards", "each-rank-told-at-its-own-call", MEMORY, "self._calls < max(self._met(name, 1))",
        "self._calls < min(self._met(name, 1))",
        "test_peers_waits.py::test_all_ranks_are_told_at_the_call_of_the_one_that_has_come_furthest",
    ),
    of(
        "shards", "hosts-agree-on-anything", MEMORY, "while host[at] != word:", "while host[at] == 0:",
        "test_peers_waits.py::test_a_first_call_that_differs_loses_no_group",
    ),
    of(
        "shards", "told-of-it-again", RANKS, "        notice.there.fill_(_NOTHING)\n", "",
        "test_shards_kept.py::test_ranks_that_differ_are_told_of_it_every_time_and_once",
    ),
    of(
        "shards", "totals-of-other-lengths", STEPS, "if weighted or spread:", "if weighted:",
        "test_shards_dtensor.py::test_a_mean_of_rows_that_lie_unevenly",
    ),
    of("shards", "gone-and-not-told", "ops/losses/overwritten.py", "self._x = self._claim = None", "pass", GONE),
    of(
        "shards", "version-of-before", "ops/losses/overwritten.py",
        "        claim.bump()  # autograd then refuses whoever reads them\n", "",
        "test_shards_seams.py::test_a_loss_whose_logits_another_one_has_written_over_raises",
    ),
    of(
        "shards", "nothing-asked-of-a-mean-of-weight-0-by-kernels", NUMBERS,
        "g += tl.where(dy == 0.0, 0.0, dy / of_loss)", "g += dy / of_loss",
        "test_shards_seams.py::test_what_stands_beside_a_mean_of_weight_0_has_a_finite_gradient",
    ),
    of(
        "shards", "a-z-loss-of-0-of-nothing", "ops/losses/over_ranks/states.py",
        "counts.of_z is None or not loss.lse_square_scale", "counts.of_z is None",
        "test_shards_seams.py::test_a_z_loss_of_scale_0_is_0",
    ),
    of(
        "shards", "neg-bit-of-own-weights", STEPS, "[:held].contiguous().resolve_neg()", "[:held].contiguous()",
        "test_shards_seams.py::test_the_neg_bit_of_class_weights",
    ),
    of(
        "shards", "ignored-nan-over-ranks", "ops/losses/over_ranks/linear.py", "asked, late, ~counts.on)",
        "asked, late, ~counts.on & False)",
        "test_shards_seams.py::test_ignored_rows_have_no_part_in_any_gradient",
    ),
    of("shards", "sum-kept-for-a-mean", STEPS, "loss.reduction, loss.ignore_index, loss.label", "loss.label", KEPT),
    of(
        "shards", "kept-for-another-place", STEPS, "loss.stats, *shards[1:4],", "loss.stats, *shards[2:4],",
        "test_shards_kept.py::test_a_group_is_no_other_and_is_held_by_nobody",
    ),
    of(
        "shards", "numbers-of-other-options", NUMBERS, 'tl.where(bad > 0, float("nan"), tl.log(s))', "tl.log(s)",
        COMPARED,
    ),
    of(
        "shards", "target-of-another-shard", NUMBERS, "(t >= first) & (t < first + n_cols)", "(t < first + n_cols)",
        COLLECTED,
    ),
    of("shards", "class-among-its-own", NUMBERS, "other=0) + first", "other=0)", COLLECTED),
    of("shards", "best-of-the-last-rank", NUMBERS, "tl.where(m_r > m, best_r, best_at)", "best_r", COLLECTED),
    of("shards", "mean-of-all-rows", NUMBERS, "tl.where(on, 1.0, 0.0).to", "tl.where(on, 1.0, 1.0).to", COLLECTED),
    of("shards", "own-share-counted-twice", NUMBERS, "        a -= tl.where(here, b * w, 0.0)\n", "", COLLECTED),
    of("shards", "smoothed-targets-left-out", NUMBERS, "mask=here & asked)", "mask=here & (t < 0))", COLLECTED),
    of("shards", "sum-of-the-last-part", GRADIENT, "summed(d.sum(1))", "summed(d[:, -1].contiguous())", IN_PARTS),
    of("shards", "gradient-by-the-own-sum", GRADIENT, "d = summed(d.view(-1))", "summed(d.view(-1))", IN_PARTS),
    of(
        "shards", "plain-beside-a-dtensor", DTENSORS, "elif argument in tensors and each.numel() != 1 and",
        "elif False and",
        "test_shards_fsdp.py::test_the_weight_of_a_head_that_is_not_gathered_is_refused",
    ),
    of(
        "shards", "meshes-mixed-up", DTENSORS, "if each.device_mesh != dtensor.device_mesh:", "if False:",
        "test_shards_fsdp.py::test_a_plain_tensor_beside_a_dtensor_is_refused_by_name",
    ),
    of(
        "shards", "gradient-of-one-rank-s-share", DTENSORS, "Partial() if dim is None", "Replicate() if dim is None",
        ATTENTION,
    ),
    of(
        "shards", "broadcast-cut-as-the-rest", DTENSORS, "            if axis is not None and dim is not None and",
        "            if False and", ATTENTION,
    ),
    of(
        "shards", "merged-sink-counted-by-every-rank", DTENSORS, "(merged if argument in added else cut)", "cut",
        SCORED,
    ),
    of(
        "shards", "who-has-nothing-leaves-its-gradients-out", DTENSORS, "    y = tied(y, local, *others.values())\n",
        "", SCORED,
    ),
    of(
        "shards", "any-heads-of-key", "ops/attention/over_ranks.py", "and n_heads % ranks:", "and False:",
        "test_shards_of_calls.py::test_attention_refuses_other_placements",
    ),
    of(
        "shards", "each-rank-its-own-seed", "ops/sampling/dtensor.py",
        "            dist.broadcast(seed, group=mesh.get_group(i), group_src=0)\n", "            pass\n",
        "test_shards_of_calls.py::test_without_a_seed_ranks_with_the_same_rows_draw_the_same_tokens",
    ),
    of(
        "shards", "targets-of-dtensors-not-compared", "ops/losses/over_ranks/dtensor.py", "if distributed.CHECK:",
        "if False:",
        "test_shards_fsdp.py::test_targets_are_compared_where_the_environment_asks_for_it",
    ),
    of(
        "shards", "a-group-of-other-ranks", "ops/losses/over_ranks/dtensor.py",
        "if get_process_group_ranks(mesh.get_group()) != get_process_group_ranks(group):", "if False:",
        "test_shards_fsdp.py::test_a_head_over_other_ranks_than_the_group_s_is_refused",
    ),
    of(
        "shards", "plain-targets-under-enable", "ops/losses/over_ranks/dtensor.py", "        and together\n", "",
        "test_shards_fsdp.py::test_under_enable_a_plain_target_is_torch_s_to_take_or_to_refuse",
    ),
    of(
        "shards", "mean-of-own-rows", "ops/losses/over_ranks/dtensor.py",
        "                dist.all_reduce(total, group=group)\n",
        "                pass\n", "test_shards_fsdp.py::test_losses_that_take_whole_rows",
    ),
)  # fmt: skip
