//! Text back into bytes (RFC 4648, section 4).

/// Returns the bytes of a text; none where it is no whole one.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let groups = text.len() / 4;
    for (number, group) in text.chunks(4).enumerate() {
        let padding = group
            .iter()
            .rev()
            .take_while(|digit| **digit == b'=')
            .count();
        if padding > 2 || (padding > 0 && number + 1 < groups) {
            return None;
        }
        let mut bits = 0_u32;
        for digit in &group[..4 - padding] {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        bits <<= 6 * padding;
        let [_, first, second, third] = bits.to_be_bytes();
        bytes.extend_from_slice(&[first, second, third][..3 - padding]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor::image::base64;

    #[test]
    fn what_is_written_is_read() {
        let all: Vec<u8> = (0..=255).collect();
        for length in [0, 1, 2, 3, 4, 255, 256] {
            assert_eq!(decode(&base64(&all[..length])).unwrap(), all[..length]);
        }
    }

    #[test]
    fn what_is_no_whole_text_is_refused() {
        for text in [
            "A", "AAA", "A===", "====", "Zg==Zg==", "Zg=A", "Zm9v\n", "Zm9*", "Zm8=AAAA",
        ] {
            assert_eq!(decode(text), None, "{text:?}");
        }
    }
}
