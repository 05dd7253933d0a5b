"""Studies, probes and recommendations as JSON lines, from one database to another.

The first line says what the file is; each other one is a record of its own:

    {"kind": "header", "format": 1, "made_by": "autotune 0.9"}
    {"kind": "probe", "key", "model_digest", "model", "made_at", "outcome", "stderr_tail", "record": {...}}
    {"kind": "recommendation", the fields of Recommendation}
    {"kind": "study", "name", "user_attrs": {...}, "num_trials"}
    {"kind": "trial", "state", "value", "params", "distributions", "user_attrs", ...}    of the study above

What is there already is not added again, nothing that is there is changed, and a file that is damaged
anywhere adds nothing: it is read twice, to be checked and to be taken in.
"""

from __future__ import annotations
