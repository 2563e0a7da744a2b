"""A peer without a GPU, for the tests of its process."""

import json
import os
import sys
import time


def main():
    name = sys.argv[1]
    with os.fdopen(int(sys.argv[2]), "w") as out:
        request = json.loads(sys.stdin.readline())
        if name == "slow":
            time.sleep(60)
        if name == "dead":
            sys.exit(3)
        ready = {"error": 0.0, "mode": "graph", "what": f"T={request['shape']['T']}"}
        out.write(json.dumps(ready if name == "fine" else {"not_run": "no wheel"}) + "\n")
        out.flush()
        for line in sys.stdin:
            asked = json.loads(line)
            samples = [7.5] * asked.get("sample", 0)
            answer = {"count": 3} if "count" in asked else {"samples": samples}
            out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
