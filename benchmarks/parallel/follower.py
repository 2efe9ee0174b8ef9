"""The process that starts the ranks of host 1, as given by JSON on its command line. It ends when rank 0 ends."""

import json
import sys

from specinfer.setup.follower import follow

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    sys.exit(follow(job["model"], **job["options"]))
