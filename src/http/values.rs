//! How much a JSON text would take in memory, told before it is read.

/// Returns the most values that `text` can have, names of fields among them. In memory one takes a hundred
/// bytes and more, whatever its text does.
pub(crate) fn count_values(text: &[u8]) -> usize {
    let mut values = 1;
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => {
                while let Some(byte) = bytes.next() {
                    match byte {
                        b'\\' => drop(bytes.next()),
                        b'"' => break,
                        _ => {}
                    }
                }
            }
            b',' | b':' | b'[' | b'{' => values += 1,
            _ => {}
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        assert_eq!(count_values(b"1"), 1);
        assert_eq!(count_values(br#"[{"a": 0, "b": [1, 2]}]"#), 1 + 3 + 2 + 2);
        assert_eq!(count_values(br#""[,{:\",:""#), 1);
        // Torn text is the parser's to refuse.
        assert_eq!(count_values(br#""\"#), 1);
    }
}
