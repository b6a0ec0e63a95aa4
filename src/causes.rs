//! What an error says, with why.

/// Returns the error with all its causes, on one line.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Level(&'static str, #[source] Option<Box<Self>>);

    #[test]
    fn all_causes_are_said() {
        let inner = Level("disk full", None);
        assert_eq!(with_causes(&inner), "disk full");
        let middle = Level("writing `a`", Some(Box::new(inner)));
        let outer = Level("saving", Some(Box::new(middle)));
        assert_eq!(with_causes(&outer), "saving: writing `a`: disk full");
    }
}
