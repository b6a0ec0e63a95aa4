//! The lines of a patch.

use super::DiffError;

/// A patch, line by line.
pub(super) struct Source<'a> {
    lines: Vec<&'a str>,
    at: usize,
}

impl<'a> Source<'a> {
    pub(super) fn new(patch: &'a str) -> Self {
        let mut lines: Vec<&str> = patch.split('\n').collect();
        if lines.last() == Some(&"") {
            lines.pop();
        }
        Self { lines, at: 0 }
    }

    pub(super) fn peek(&self) -> Option<&'a str> {
        self.lines.get(self.at).copied()
    }

    pub(super) fn advance(&mut self) {
        self.at += 1;
    }

    pub(super) fn malformed(&self) -> DiffError {
        DiffError::Malformed { line: self.at + 1 }
    }

    /// Goes to the first line about a file, or to the end.
    pub(super) fn skip_preamble(&mut self) {
        while let Some(line) = self.peek() {
            let next = self.lines.get(self.at + 1);
            let is_plain =
                line.starts_with("--- ") && next.is_some_and(|next| next.starts_with("+++ "));
            if line.starts_with("diff --git ") || is_plain {
                break;
            }
            self.advance();
        }
    }

    /// Goes behind the content of a file that is not text.
    pub(super) fn skip_binary(&mut self) {
        while self
            .peek()
            .is_some_and(|line| !line.starts_with("diff --git "))
        {
            self.advance();
        }
    }
}

/// A line before the first hunk.
pub(super) enum Header<'a> {
    Old(&'a str),
    New(&'a str),
    RenameFrom(&'a str),
    RenameTo(&'a str),
    /// The mode before, the mode after or that of a file that goes.
    Mode(&'a str),
    NewFile(&'a str),
    DeletedFile(&'a str),
    Binary,
    /// Something that says nothing about paths.
    Other(&'a str),
}

impl<'a> Header<'a> {
    pub(super) fn of(line: &'a str) -> Option<Self> {
        let after = |prefix: &str| line.strip_prefix(prefix);
        let path = |prefix: &str| after(prefix).map(str::trim_end);
        Some(if let Some(path) = after("--- ") {
            Self::Old(path)
        } else if let Some(path) = after("+++ ") {
            Self::New(path)
        } else if let Some(path) = path("rename from ").or_else(|| path("copy from ")) {
            Self::RenameFrom(path)
        } else if let Some(path) = path("rename to ").or_else(|| path("copy to ")) {
            Self::RenameTo(path)
        } else if let Some(mode) = path("old mode ").or_else(|| path("new mode ")) {
            Self::Mode(mode)
        } else if let Some(mode) = path("new file mode ") {
            Self::NewFile(mode)
        } else if let Some(mode) = path("deleted file mode ") {
            Self::DeletedFile(mode)
        } else if line.starts_with("Binary files ") && line.ends_with(" differ") {
            Self::Binary
        } else {
            let known = ["index ", "similarity index ", "dissimilarity index "];
            Self::Other(known.into_iter().find_map(after)?)
        })
    }

    /// Whether it makes the file a link or a submodule.
    pub(super) fn is_special(&self) -> bool {
        let mode = match self {
            Self::Mode(mode) | Self::NewFile(mode) | Self::DeletedFile(mode) => mode,
            Self::Other(index) => index.rsplit(' ').next().unwrap_or_default(),
            _ => return false,
        };
        mode.len() == 6
            && !mode.starts_with("100")
            && mode.bytes().all(|byte| byte.is_ascii_digit())
    }
}

/// A side of a change.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// There is no such file, which is written `/dev/null`.
    Nothing,
    File(String),
}

impl Side {
    fn path(self) -> Option<String> {
        match self {
            Self::Nothing => None,
            Self::File(path) => Some(path),
        }
    }
}

/// What the lines before the hunks say about a file's paths.
#[derive(Default)]
pub(super) struct Paths {
    /// What the first line says.
    pub(super) first: Option<String>,
    /// Of the first line, where both are the same.
    pub(super) both: Option<String>,
    pub(super) old: Option<Side>,
    pub(super) new: Option<Side>,
    renamed: (Option<String>, Option<String>),
    /// Whether one of these has blanks that are not quoted.
    has_open_blanks: bool,
    is_new: bool,
    is_deleted: bool,
}

impl Paths {
    /// Takes a line; nothing where its path cannot be read.
    pub(super) fn note(&mut self, header: &Header<'_>) -> Option<()> {
        match header {
            Header::Old(text) => self.old = Some(marked_path(text, "a/")?),
            Header::New(text) => self.new = Some(marked_path(text, "b/")?),
            Header::RenameFrom(text) => self.renamed.0 = Some(self.renamed_path(text)?),
            Header::RenameTo(text) => self.renamed.1 = Some(self.renamed_path(text)?),
            Header::NewFile(_) => self.is_new = true,
            Header::DeletedFile(_) => self.is_deleted = true,
            Header::Mode(_) | Header::Binary | Header::Other(_) => {}
        }
        Some(())
    }

    fn renamed_path(&mut self, text: &str) -> Option<String> {
        self.has_open_blanks |= bare_path(text).is_none();
        unquote(text)
    }

    /// Returns the paths before and after; nothing where the lines disagree or name none.
    pub(super) fn settle(self) -> Option<(Option<String>, Option<String>)> {
        if self.has_open_blanks {
            // `patch` reads no more than the first word of each, unless it cannot read the first line either.
            let (from, to) = (self.renamed.0.as_ref()?, self.renamed.1.as_ref()?);
            if self.first != Some(format!("a/{from} b/{to}")) {
                return None;
            }
        }
        let (was, is) = (self.old.map(Side::path), self.new.map(Side::path));
        let (old, new) = match (was, is, self.renamed) {
            (None, None, (Some(from), Some(to))) => (Some(from), Some(to)),
            (Some(old), Some(new), (None, None)) => {
                let is_rename = old.is_some() && new.is_some() && old != new;
                if is_rename {
                    return None;
                }
                (old, new)
            }
            (Some(old), Some(new), (from, to)) if old == from && new == to => (old, new),
            (None, None, (None, None)) => {
                let path = self.both.clone()?;
                let side = |is_absent: bool| (!is_absent).then(|| path.clone());
                (side(self.is_new), side(self.is_deleted))
            }
            _ => return None,
        };
        let is_told = self
            .both
            .as_ref()
            .is_none_or(|both| [&old, &new].into_iter().flatten().all(|path| path == both));
        let is_consistent = (!self.is_new || old.is_none()) && (!self.is_deleted || new.is_none());
        (is_told && is_consistent && (old.is_some() || new.is_some())).then_some((old, new))
    }
}

/// Reads the path of a `---` or `+++` line.
fn marked_path(text: &str, mark: &str) -> Option<Side> {
    // Git puts a tab behind a path with blanks, and GNU diff a time behind that. Without it, `patch` takes the path to
    // end at its first blank.
    let path = match text.split_once('\t') {
        Some((path, _)) if !text.starts_with('"') => unquote(path)?,
        _ => bare_path(text.trim_end_matches('\r'))?,
    };
    if path == "/dev/null" {
        return Some(Side::Nothing);
    }
    path.strip_prefix(mark)
        .map(|path| Side::File(path.to_owned()))
}

/// Reads a path with nothing behind it. One with blanks must be in quotes: `patch` takes others to end at the first, and
/// so to be of another file.
fn bare_path(text: &str) -> Option<String> {
    let is_plain = text.starts_with('"') || !text.contains(char::is_whitespace);
    is_plain.then(|| unquote(text)).flatten()
}

/// Returns the path of a first line that names the same file twice.
pub(super) fn same_path(text: &str) -> Option<String> {
    if let Some(inside) = text.strip_prefix('"') {
        let end = inside.find("\" \"")? + 2; // behind the quote that closes the first path
        let (old, new) = (unquote(&text[..end])?, unquote(&text[end + 1..])?);
        let (old, new) = (old.strip_prefix("a/")?, new.strip_prefix("b/")?);
        return (old == new).then(|| old.to_owned());
    }
    // `a/P b/P`, where P may hold blanks: both halves are as long.
    let half = text.len().checked_sub(1)? / 2;
    let (old, new) = (text.get(..half)?, text.get(half + 1..)?);
    let (old, new) = (old.strip_prefix("a/")?, new.strip_prefix("b/")?);
    (old == new).then(|| old.to_owned())
}

/// Reads a path as git writes it: as it is, or in quotes with escapes as in C.
fn unquote(text: &str) -> Option<String> {
    let Some(inside) = text.strip_prefix('"') else {
        return (!text.contains('"')).then(|| text.to_owned());
    };
    let mut bytes = inside.strip_suffix('"')?.bytes();
    let mut path = Vec::new();
    while let Some(byte) = bytes.next() {
        let byte = match byte {
            b'"' => return None,
            b'\\' => match bytes.next()? {
                b'a' => 7,
                b'b' => 8,
                b't' => b'\t',
                b'n' => b'\n',
                b'v' => 11,
                b'f' => 12,
                b'r' => b'\r',
                quoted @ (b'"' | b'\\') => quoted,
                first @ b'0'..=b'3' => {
                    let mut digit = || {
                        let digit = bytes.next()?;
                        (b'0'..=b'7').contains(&digit).then(|| digit - b'0')
                    };
                    (first - b'0') * 64 + digit()? * 8 + digit()?
                }
                _ => return None,
            },
            other => other,
        };
        path.push(byte);
    }
    String::from_utf8(path).ok()
}

/// Reads the lengths in `@@ -1,2 +3,4 @@`.
pub(super) fn hunk_lengths(line: &str) -> Option<(usize, usize)> {
    let (ranges, _) = line.strip_prefix("@@ -")?.split_once(" @@")?;
    let (old, new) = ranges.split_once(" +")?;
    let length = |range: &str| {
        let (start, length) = range.split_once(',').unwrap_or((range, "1"));
        let _: usize = start.parse().ok()?;
        length.parse().ok()
    };
    Some((length(old)?, length(new)?))
}
