import collections, json, re

text = json.dumps({"a": [1, 2.5, None], "b": "text"})
print(json.loads(text), re.findall(r"\d+", "a1b22"), collections.Counter("hello"))
