"""The command line in a process that torchrun has started, with a fault in one process of the first attempt.

`torchrun ... -m tests.distributed.attempts JOB ARGUMENTS...`: JOB is that of tests/faults/faulty.py, with the ``rank``
that it is for.
"""

import json
import os
import sys

from modelopt_sparse.cli.commands import main
from tests.faults.faulty import Operations, count_exchanges

if __name__ == "__main__":
    job = json.loads(sys.argv.pop(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == str(job["rank"]):
        count_exchanges()
        sys.addaudithook(Operations(job))
    main()
