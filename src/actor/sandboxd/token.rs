//! The word that a server asks for.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use axum::http::HeaderValue;

/// The shortest token that a server takes: it must not be guessed.
const MIN: usize = 16;
/// The longest that is read.
const MAX: u64 = 16 << 10;

/// What a client sends as `Authorization: Bearer`. It is never shown.
#[derive(Clone)]
pub struct BearerToken(String);

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// Its file cannot be read.
    #[error("the token could not be read")]
    Read(#[from] std::io::Error),
    /// Its variable is not set.
    #[error("the variable `{name}`, which should hold the token, is not set")]
    Unset {
        /// The variable.
        name: String,
    },
    /// It is larger than any that is read.
    #[error("`{}` has more than {MAX} bytes, and is no token", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is too short to keep anybody out.
    #[error("the token has {length} characters, fewer than {MIN}; take random ones")]
    TooShort {
        /// How many it has.
        length: usize,
    },
    /// It cannot be sent.
    #[error("the token has characters that no header can have")]
    Unsendable,
}

impl std::fmt::Debug for BearerToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BearerToken")
    }
}

impl BearerToken {
    /// Takes a token, without the space around it.
    ///
    /// # Errors
    ///
    /// Fails where it is shorter than 16 characters or cannot be sent.
    pub fn new(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        if text.len() < MIN {
            return Err(TokenError::TooShort { length: text.len() });
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TokenError::Unsendable);
        }
        Ok(Self(text.to_owned()))
    }

    /// Reads it from a file.
    ///
    /// # Errors
    ///
    /// As for [`Self::new`], and where the file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self, TokenError> {
        let mut text = String::new();
        let file = fs_err::File::open(path)?;
        file.take(MAX + 1).read_to_string(&mut text)?;
        match text.len() as u64 > MAX {
            true => Err(TokenError::TooLarge {
                path: path.to_owned(),
            }),
            false => Self::new(&text),
        }
    }

    /// Reads it from a variable of this process.
    ///
    /// # Errors
    ///
    /// As for [`Self::new`], and where the variable is not set.
    pub fn from_variable(name: &str) -> Result<Self, TokenError> {
        let text = std::env::var(name).map_err(|_| TokenError::Unset {
            name: name.to_owned(),
        })?;
        Self::new(&text)
    }

    /// Returns it.
    pub(in crate::actor) fn text(&self) -> &str {
        &self.0
    }

    /// Returns the header's value, which is not shown either.
    pub(in crate::actor) fn header(&self) -> HeaderValue {
        let mut value = HeaderValue::try_from(format!("Bearer {}", self.0))
            .expect("its characters were looked at");
        value.set_sensitive(true);
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_long_sendable_and_not_shown() {
        let token = BearerToken::new(" 0123456789abcdef\n").unwrap();
        assert_eq!(token.header(), "Bearer 0123456789abcdef");
        assert!(!format!("{token:?} {:?}", token.header()).contains("0123"));
        for wrong in ["short", "0123456789abcde\u{e9}", "01234567 89abcdef"] {
            BearerToken::new(wrong).unwrap_err();
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs_err::write(&path, "x".repeat(20_000)).unwrap();
        let error = BearerToken::from_file(&path).unwrap_err();
        assert!(matches!(error, TokenError::TooLarge { .. }), "{error}");
        BearerToken::from_variable("WARDIAN_NO_SUCH_VARIABLE").unwrap_err();
    }
}
