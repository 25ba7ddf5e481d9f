"""Faults of what a recording says beside its numbers: notes, messages, states, summaries."""

from fault import of

NOTES = "test_trace_notes.py::test_every_note_is_true_of_hidden_lost_tied_and_single_values"
RECORDER = "trace/recorder/recorder.py"

TRACE = (
    of(
        "trace", "note-at-the-line-before", "trace/entries/rows.py", '"tl.atomic_xchg": "One 64-bit',
        '"message = pack_state": "One 64-bit', NOTES + "[split]",
    ),
    of(
        "trace", "note-at-the-maximum-and-not-the-sum", "trace/entries/classic.py", '"s = s *": "The old sum',
        '"m = m_new": "The old sum', NOTES + "[online]",
    ),
    of(
        "trace", "message-of-part-0-collected-of-all", RECORDER, "numbers(item(now[local], each)",
        "numbers(item(now[local], 0)", NOTES + "[split]",
    ),
    of(
        "trace", "message-published-by-the-next-part", RECORDER, '"from": program.part}', '"from": program.part + 1}',
        NOTES + "[split]",
    ),
    of(
        "trace", "note-of-a-target-at-its-maximum", "trace/entries/rows.py", '"dx_t = gradient_of_logits": "At the',
        '"scale, base = origin_of": "At the', NOTES + "[cross-entropy]",
    ),
    of(
        "trace", "note-of-a-third-read-at-the-second", "trace/entries/classic.py", '"s = total": "The maximum',
        '"total = tl.zeros": "The maximum', NOTES + "[hybrid-tiled]",
    ),
    of(
        "trace", "gradient-of-the-mean-not-divided", "trace/entries/rows.py",
        " elsewhere, divided by the number of rows.", " elsewhere.",
        "test_trace.py::test_presets_are_what_the_kernels_do",
    ),
)  # fmt: skip
