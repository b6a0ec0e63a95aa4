//! Addresses as messages show them: without the user and the password that they may hold.

/// What stands in the place of a user.
const HIDDEN: &str = "…";

/// Returns a URL with what precedes the host's `@` hidden; anything else as it is.
pub(crate) fn shown(url: &str) -> String {
    let start = url.find("://").map_or(0, |at| at + "://".len());
    let (scheme, rest) = url.split_at(start);
    match user_end(rest) {
        None => url.to_owned(),
        Some(end) => format!("{scheme}{HIDDEN}{}", &rest[end..]),
    }
}

/// Does what [`shown`] does with every URL in a text.
pub(crate) fn shown_in(text: &str) -> String {
    let mut pieces = text.split("://");
    let mut told = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let end = piece.find(|letter: char| letter.is_whitespace() || "\"'<>`".contains(letter));
        let (url, behind) = piece.split_at(end.unwrap_or(piece.len()));
        told.push_str(&shown(&format!("://{url}")));
        told.push_str(behind);
    }
    told
}

/// Returns where the `@` is that ends the user, in what follows a scheme.
fn user_end(rest: &str) -> Option<usize> {
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let host = &rest[..end];
    if let Some(at) = host.rfind('@') {
        return Some(at);
    }
    // A password with one of these in it ends what looks like the host, whose port is none then.
    let (_, port) = host.rsplit_once(':')?;
    let is_port = port.ends_with(']') || port.bytes().all(|digit| digit.is_ascii_digit());
    match is_port {
        true => None,
        false => rest.rfind('@'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_passwords_are_hidden() {
        for (url, expected) in [
            ("http://me:secret@host:80/v1", "http://…@host:80/v1"),
            ("https://token@host", "https://…@host"),
            ("http://me:se@cret@host/@x", "http://…@host/@x"),
            ("http://me:se/cret@host/v1", "http://…@host/v1"),
            ("me:secret@host:80", "…@host:80"),
            // Nobody to hide.
            ("http://host:80/a@b?c=d@e", "http://host:80/a@b?c=d@e"),
            ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
            ("http://[::1]/a@b", "http://[::1]/a@b"),
            ("x:1", "x:1"),
            ("", ""),
        ] {
            assert_eq!(shown(url), expected, "{url}");
        }
    }

    #[test]
    fn every_address_of_a_text_is_hidden_for_itself() {
        let text = "http = \"http://me:secret@host/a\"\npath = \"a/b@main\"\nurl = 'wss://x' # https://y@z";
        let expected =
            "http = \"http://…@host/a\"\npath = \"a/b@main\"\nurl = 'wss://x' # https://…@z";
        assert_eq!(shown_in(text), expected);
        assert_eq!(shown_in("a@b"), "a@b");
    }
}
