"""A peer without a GPU, for the tests of its process."""

import json
import os
import sys
import time


def main():
    name = sys.argv[1]
    with os.fdopen(int(sys.argv[2]), "w") as out:

        def tell(answer):
            out.write(json.dumps(answer) + "\n")
            out.flush()

        for line in sys.stdin:
            asked = json.loads(line)
            if "shape" in asked:
                tell(begun(name, asked["shape"]["T"]))
            elif "rest" not in asked:
                samples = [7.5] * asked.get("sample", 0)
                tell({"count": 3} if "count" in asked else {"samples": samples})


def begun(name, tokens):
    """Ready, or not, for a shape."""
    if name == "slow" or (name == "slow once" and tokens == 8):
        time.sleep(60)
    if name == "dead":
        sys.exit(3)
    if name == "none":
        return {"not_run": "no wheel"}
    return {"error": 0.0, "mode": "graph", "what": f"T={tokens}, process {os.getpid()}"}


if __name__ == "__main__":
    main()
