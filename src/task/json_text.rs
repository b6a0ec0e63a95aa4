//! JSON as text: the parts of an object or an array without reading their values, so that numbers
//! keep all their digits.

/// Returns the members of an object or the elements of an array, as texts; an element has no name.
///
/// `None` where `text` is neither, or not JSON: it is read in full, to be sure.
pub(super) fn parts(text: &str) -> Option<Vec<(String, &str)>> {
    serde_json::from_str::<serde::de::IgnoredAny>(text).ok()?;
    let text = text.trim();
    let is_object = text.starts_with('{');
    if !is_object && !text.starts_with('[') {
        return None;
    }
    let inside = &text[1..text.len() - 1];
    let mut found = Vec::new();
    for part in split(inside, b',') {
        let part = part.trim();
        if part.is_empty() {
            continue; // there is nothing between the brackets
        }
        if is_object {
            let name = split(part, b':').next()?;
            let value = part.get(name.len() + 1..)?.trim();
            found.push((serde_json::from_str(name).ok()?, value));
        } else {
            found.push((String::new(), part));
        }
    }
    Some(found)
}

/// Splits valid JSON at a separator that is in no string and no brackets.
fn split(text: &str, separator: u8) -> impl Iterator<Item = &str> {
    let bytes = text.as_bytes();
    let mut start = 0;
    let mut is_over = false;
    std::iter::from_fn(move || {
        if is_over {
            return None;
        }
        let (mut depth, mut in_string, mut at) = (0_usize, false, start);
        while at < bytes.len() {
            match bytes[at] {
                b'\\' if in_string => at += 1,
                b'"' => in_string = !in_string,
                _ if in_string => {}
                b'[' | b'{' => depth += 1,
                b']' | b'}' => depth = depth.saturating_sub(1),
                byte if byte == separator && depth == 0 => {
                    let part = &text[start..at];
                    start = at + 1;
                    return Some(part);
                }
                _ => {}
            }
            at += 1;
        }
        is_over = true;
        Some(&text[start..])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_keep_their_text() {
        let text =
            r#" {"inputs": [[1, 100000000000000000000, "a,\"]{"], [{"x": [2]}]], "b": 1.50 } "#;
        let members = parts(text).unwrap();
        assert_eq!(members[1], ("b".to_owned(), "1.50"));
        let inputs: Vec<&str> = parts(members[0].1)
            .unwrap()
            .into_iter()
            .map(|part| part.1)
            .collect();
        assert_eq!(
            inputs,
            [r#"[1, 100000000000000000000, "a,\"]{"]"#, r#"[{"x": [2]}]"#]
        );
        assert_eq!(parts("[]").unwrap().len(), 0);
        for other in ["1", "", "[1", "[1,]", "{\"a\" 1}", "\"[1]\""] {
            assert!(parts(other).is_none(), "{other}");
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_split_is_what_serde_reads(text in r#"[\[\]{}",:\\ a1]{0,30}"#) {
            if let Some(found) = parts(&text) {
                let whole: serde_json::Value = serde_json::from_str(&text).unwrap();
                for (index, (name, part)) in found.iter().enumerate() {
                    let value: serde_json::Value = serde_json::from_str(part).unwrap();
                    match &whole {
                        serde_json::Value::Array(items) => proptest::prop_assert_eq!(&items[index], &value),
                        object => proptest::prop_assert!(object.get(name).is_some()),
                    }
                }
            }
        }
    }
}
