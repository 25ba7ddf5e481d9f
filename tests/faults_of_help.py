"""Faults of programs that stand in for missing parts of a row, which no plain run reaches."""

from fault import of

HELP = (
    of(
        "help", "polls-not-counted", "core/kernels/exchange.py", "polls += 1", "polls += 0",
        "test_shelf.py::test_what_never_comes_is_awaited_for_a_while_and_is_missing",
    ),
    of(
        "help", "missing-as-before-the-wait", "core/kernels/exchange.py",
        "        left = tl.max(missing.to(tl.int32), axis=None)\n        polls", "        polls",
        "test_shelf.py::test_what_is_wanted_is_read_until_it_carries_the_tag",
    ),
    of(
        "help", "messages-in-one-copy-alone", "core/kernels/exchange.py", "mask=j < K.copies, sem=", "mask=j < 1, sem=",
        "test_alone.py::test_softmax",
    ),
    of(
        "help", "last-part-never-missing", "core/kernels/exchange.py",
        "while part < n_parts:", "while part < n_parts - 1:",
        "test_alone.py::test_what_parts_tell_is_kept_and_the_others_are_computed", "test_alone.py::test_softmax",
    ),
    of(
        "help", "one-missing-part-alone", "core/kernels/exchange.py",
        "message, part + 1, n_parts, tag, K)", "message, n_parts, n_parts, tag, K)",
        "test_alone.py::test_what_parts_tell_is_kept_and_the_others_are_computed", "test_alone.py::test_softmax",
    ),
    of(
        "help", "state-of-the-next-part", "core/kernels/exchange.py",
        "m, s = STATE(part, given, K)", "m, s = STATE(part + 1, given, K)",
        "test_alone.py::test_what_parts_tell_is_kept_and_the_others_are_computed", "test_alone.py::test_softmax",
    ),
    of(
        "help", "slots-of-another-copy", "core/kernels/exchange.py",
        "the data was\n        slot_ptrs = slots_ptr + (part % K.copies) * n_parts + j",
        "the data was\n        slot_ptrs = slots_ptr + j",
        "test_alone.py::test_what_parts_tell_is_kept_and_the_others_are_computed",
    ),
    of(
        "help", "told-for-another-part", "core/kernels/exchange.py",
        "        message = tl.where((j == part) &",
        "        tl.store(slots_ptr + part, pack_state(m, s, tag))\n        message = tl.where((j == part) &",
        "test_alone.py::test_what_parts_tell_is_kept_and_the_others_are_computed",
    ),
    of(
        "help", "slots-not-read-after-the-data", "core/kernels/exchange.py",
        "        message = tl.load(slot_ptrs, mask=(j < n_parts) & (tag_of(message) != tag), other=message, "
        "volatile=True)\n        message = tl.where(", "        message = tl.where(",
        "test_alone.py::test_what_parts_tell_is_kept_and_the_others_are_computed",
    ),
    of(
        "help", "no-barrier-after-the-data", "core/kernels/exchange.py",
        "        tl.debug_barrier()  # no slot is read before the data was", "",
        "test_alone.py::test_between_the_data_and_the_slots_there_is_a_barrier",
    ),
    of(
        "help", "what-came-meanwhile-overruled", "core/kernels/exchange.py",
        "tl.where((j == part) & (tag_of(message) != tag), pack", "tl.where(j == part, pack",
        "test_alone.py::test_what_parts_tell_is_kept_and_the_others_are_computed",
    ),
    of(
        "help", "a-tag-found-anew", "ops/softmax/kernels/forward.py",
        "slots_ptr = slots_again(slots_ptr, row, n_parts, K.copies)",
        "slots_ptr, tag = slots_of(slots_ptr, row, part, n_parts, K.copies, K)",
        "test_alone.py::test_softmax",
    ),
    of(
        "help", "results-at-the-first-part", "ops/softmax/kernels/forward.py",
        "r = part_of(part, row, x, n_cols,", "r = part_of(part * 0, row, x, n_cols,",
        "test_alone.py::test_softmax",
    ),
    of(
        "help", "results-without-the-sink", "ops/softmax/kernels/forward.py",
        "edge, message, sink_of_row(row, S, K), r", "edge, message, 0.0, r",
        "test_alone.py::test_softmax",
    ),
    of(
        "help", "gradient-by-the-dot-of-its-part", "ops/softmax/kernels/gradient.py",
        "    _, edge_y, edge_dy = dot_of_row(", "    d, edge_y, edge_dy = dot_of_row(",
        "test_alone.py::test_gradient",
    ),
    of(
        "help", "lse-of-no-greedy-row", "ops/softmax/kernels/logsumexp.py",
        "greedy = scores_of_row(row, n_cols, S, K).greedy", "greedy = False",
        "test_alone.py::test_logsumexp",
    ),
    of(
        "help", "row-without-its-copies", "ops/losses/kernels/held.py",
        "slots_again(slots_ptr, row, L.n_parts, K.copies)", "slots_again(slots_ptr, row, L.n_parts, 1)",
        "test_alone.py::test_losses_and_their_gradient",
    ),
    of(
        "help", "target-read-after-its-gradient", "ops/losses/kernels/held.py", "asked = T.kept & writes",
        "asked = T.kept",
        "test_alone.py::test_losses_of_logits_below_the_gradient_that_is_written_over_them",
    ),
    of(
        "help", "loss-finished-twice", "ops/losses/kernels/held.py",
        "            else:\n                m, s = merged(message, n_parts, K)\n                finish_part(",
        "            m, s = merged(message, n_parts, K)\n            finish_part(",
        "test_alone.py::test_a_loss_that_one_launch_sums",
    ),
    of(
        "help", "states-of-the-first-group", "ops/softmax/kernels/columns.py",
        "columns_of(given.group, part * given.part_cols, given.n_cols, given.n_inner, K)\n    _, m, s",
        "columns_of(given.group * 0, part * given.part_cols, given.n_cols, given.n_inner, K)\n    _, m, s",
        "test_alone.py::test_over_a_strided_dim",
    ),
    of(
        "help", "group-without-its-positions", "ops/softmax/kernels/columns.py",
        "slots_again(slots_ptr, group, n_parts, K.block_inner)\n    d =",
        "slots_again(slots_ptr, group, n_parts, K.copies)\n    d =",
        "test_alone.py::test_over_a_strided_dim",
    ),
    of(
        "help", "told-at-one-position-is-told", "ops/softmax/kernels/column_tiles.py",
        "tl.max(((lanes == part) & (tag_of(message) != tag)).to(tl.int32), axis=None)",
        "tl.min(tl.max(((lanes == part) & (tag_of(message) != tag)).to(tl.int32), axis=1), axis=0)",
        "test_alone.py::test_the_same_of_every_inner_position",
    ),
    of(
        "help", "positions-overruled", "ops/softmax/kernels/column_tiles.py",
        "missing = (tl.arange(0, LANES)[None, :] == part) & (tag_of(message) != tag)",
        "missing = (tl.arange(0, LANES)[None, :] == part) & (slot_ptrs == slot_ptrs)",
        "test_alone.py::test_the_same_of_every_inner_position",
    ),
)  # fmt: skip
