"""The re module: finding, replacing with groups, iterating and alternation."""

import re

TEXT = (
    "On 2024-03-15 alice@example.com wrote: cost is $12.50, call +1-555-0100; "
    "see http://example.org/path?q=1 and bob.smith@test.co.uk on 2023-12-01. "
) * 300


def run(rounds):
    found = 0
    for _ in range(rounds):
        found += len(re.findall(r"\d{4}-\d{2}-\d{2}", TEXT))
        found += len(re.findall(r"[\w.]+@[\w.]+\.\w+", TEXT))
        found += len(re.sub(r"\$(\d+)\.(\d+)", r"USD \1,\2", TEXT))
        found += len(re.findall(r"(?i)https?://[^\s]+", TEXT))
        found += sum(len(match.group(1)) for match in re.finditer(r"\b(\w+)\b", TEXT))
        found += len(re.split(r"[;:,]\s|\s(?:and|on|is)\s", TEXT))
    return found


print(run(85))
