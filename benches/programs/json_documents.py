"""The json module: both ways, with and without indentation."""

import json

DOCUMENT = {
    "users": [
        {
            "id": i,
            "name": "user %d" % i,
            "tags": ["a", "b", "c\n"],
            "score": i * 1.25,
            "ok": i % 2 == 0,
            "none": None,
        }
        for i in range(400)
    ]
}


def run(rounds):
    size = 0
    for _ in range(rounds):
        text = json.dumps(DOCUMENT)
        size += len(text) + len(json.loads(text)["users"])
    return size, len(json.dumps(DOCUMENT, indent=1, sort_keys=True))


print(*run(560))
