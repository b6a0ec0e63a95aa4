"""Text: formatting, methods, splitting, joining and growing by one character."""


def run(count):
    lines = []
    total = 0
    for i in range(count):
        line = f"item-{i:05d}:{i * 3}"
        lines.append(line.upper().replace("ITEM", "x").strip())
        if len(lines) > 500:
            parts = ",".join(lines).split(",")
            total += sum(len(part) for part in parts if part.endswith("7"))
            lines = parts[:1]
    word = ""
    for i in range(60_000):
        word += chr(97 + i % 26)
    vowels = sum(1 for letter in word if letter in "aeiou")
    return total, vowels, word[::-1].find("zyx")


print(*run(900_000))
