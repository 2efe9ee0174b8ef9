"""The ranks of host 1, in a process that is told of them by its command line, as JSON, and ends when rank 0 does."""

import json
import sys

from specinfer.follower import follow

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    sys.exit(follow(job["model"], **job["options"]))
