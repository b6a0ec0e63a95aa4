//! The name of an image.

use std::str::FromStr;

use crate::actor::ActorError;

/// An image of a registry that is named: `registry.example.org/path/name:tag`, or with `@sha256:…`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageReference {
    registry: String,
    repository: String,
    reference: String,
}

impl ImageReference {
    /// Returns the registry's host, with its port if it has one.
    #[must_use]
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Returns the path of the image in its registry.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Returns its tag or digest.
    #[must_use]
    pub fn reference(&self) -> &str {
        &self.reference
    }
}

impl FromStr for ImageReference {
    type Err = ActorError;

    fn from_str(text: &str) -> Result<Self, ActorError> {
        let invalid = |why: &str| ActorError::InvalidSpec {
            reason: format!(
                "`{text}` is no image: {why}; write it as `registry.example.org/name:tag`"
            ),
        };
        let (registry, rest) = text
            .split_once('/')
            .ok_or_else(|| invalid("it names no registry"))?;
        let is_host = registry.contains(['.', ':']) || registry == "localhost";
        let is_plain = |part: &str, more: &[u8]| {
            let mut bytes = part.bytes();
            !part.is_empty()
                && part.len() <= 255
                && bytes.all(|b| b.is_ascii_alphanumeric() || more.contains(&b))
        };
        if !is_host || !is_plain(registry, b".-:[]") {
            return Err(invalid("it names no registry"));
        }
        let (path, digest) = match rest.split_once('@') {
            Some((path, digest)) => (path, Some(digest)),
            None => (rest, None),
        };
        // With a digest a tag says nothing.
        let (path, tag) = match path.rsplit_once(':') {
            Some((path, tag)) => (path, tag),
            None => (path, "latest"),
        };
        let mut parts = path.split('/');
        if !parts.all(|part| is_plain(part, b"._-") && part != "." && part != "..") {
            return Err(invalid("its path is of letters, digits, `.`, `_` and `-`"));
        }
        if path.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(invalid("its path is in lower case"));
        }
        let reference = match digest {
            Some(digest) => match digest.split_once(':') {
                Some((kind, hash)) if is_plain(kind, b"") && is_plain(hash, b"") => digest,
                _ => return Err(invalid("its digest is an algorithm and a hash")),
            },
            None if is_plain(tag, b"._-") => tag,
            None => return Err(invalid("its tag is of letters, digits, `.`, `_` and `-`")),
        };
        Ok(Self {
            registry: registry.to_owned(),
            repository: path.to_owned(),
            reference: reference.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        for (text, registry, repository, reference) in [
            (
                "registry.example.org/a",
                "registry.example.org",
                "a",
                "latest",
            ),
            ("localhost/a/b_c:1.0", "localhost", "a/b_c", "1.0"),
            ("127.0.0.1:5000/a:x", "127.0.0.1:5000", "a", "x"),
            (
                "r.example.org/a:x@sha256:00ff",
                "r.example.org",
                "a",
                "sha256:00ff",
            ),
        ] {
            let image: ImageReference = text.parse().unwrap();
            assert_eq!(image.registry(), registry);
            assert_eq!(image.repository(), repository);
            assert_eq!(image.reference(), reference);
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "",
            "a",
            "a/b",
            "r.example.org/",
            "r.example.org/A",
            "r.example.org/a/../b",
            "r.example.org/a?x=y",
            "r.example.org/a:b c",
            "r.example.org/a@sha256",
            "r.example.org/a@sha256:x/y",
            "r@x.example.org/a",
        ] {
            let error = text.parse::<ImageReference>().unwrap_err();
            assert!(error.to_string().contains("is no image"), "{text}: {error}");
        }
    }
}
