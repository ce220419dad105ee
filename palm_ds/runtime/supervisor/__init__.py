"""Starts a run, watches it and starts it again: `palm-ds run`.

supervise.py ── one Attempt after another ──> attempt.py ── an agent on each host ──> agent.py
                                                            │ messages.py                │
command_line.py: what each host starts                      └── JSON lines, both ways ───┘

None of it imports torch. What the training processes say of themselves is in
palm_ds/runtime/processes/rank_status.py.
"""
