//! A patch taken apart: which files it changes, and the part of it that may be applied.
//!
//! The patch comes from a sandbox that the policy had, so it is not believed: what is kept is
//! written out again from what was understood, a file that lies outside the repository, a link or a
//! submodule refuses the whole, and lines that a lenient program could take for commands are left
//! out.

mod lines;

use lines::{Header, Paths, Source};

/// The largest patch that is read. The largest of Verified's own has 30 KiB.
const MAX_PATCH_BYTES: usize = 8 << 20;

/// The most files of a patch.
const MAX_FILES: usize = 2000;

/// Why a patch is none. The policy's fault, which has a reward.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiffError {
    /// The patch is over a limit.
    #[error("the patch is too large: {found} {what} > {limit}")]
    TooLarge {
        /// What was measured.
        what: &'static str,
        /// How much there is.
        found: usize,
        /// How much is read.
        limit: usize,
    },
    /// A line is none of a patch.
    #[error("line {line} of the patch is not what `git diff` writes")]
    Malformed {
        /// The line, from 1.
        line: usize,
    },
    /// A file is outside the repository, or inside git's own folder.
    #[error("the patch changes `{path}`, which is no file of the repository")]
    Outside {
        /// The path.
        path: String,
    },
    /// A file is a link or a submodule.
    #[error("the patch makes `{path}` a link or a submodule")]
    Special {
        /// The path.
        path: String,
    },
}

/// The part of a patch about one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePatch {
    /// The path before; none where the file is new.
    pub old: Option<String>,
    /// The path after; none where the file goes.
    pub new: Option<String>,
    /// Lines added.
    pub added: usize,
    /// Lines removed.
    pub removed: usize,
    /// Whether the file is not text.
    pub is_binary: bool,
    /// The part itself.
    pub text: String,
}

impl FilePatch {
    /// Returns the paths that it changes, one or two.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.old.as_deref().into_iter().chain(self.new.as_deref())
    }
}

/// Takes a patch apart.
///
/// Text before the first file, such as a message, is left out.
///
/// # Errors
///
/// Fails where it is not what `git diff` writes, or changes what is no file of the repository.
pub fn parse_diff(patch: &str) -> Result<Vec<FilePatch>, DiffError> {
    if patch.len() > MAX_PATCH_BYTES {
        return Err(DiffError::TooLarge {
            what: "bytes",
            found: patch.len(),
            limit: MAX_PATCH_BYTES,
        });
    }
    let mut source = Source::new(patch);
    source.skip_preamble();
    let mut files = Vec::new();
    while source.peek().is_some() {
        if files.len() == MAX_FILES {
            return Err(DiffError::TooLarge {
                what: "files",
                found: MAX_FILES + 1,
                limit: MAX_FILES,
            });
        }
        files.push(read_file(&mut source)?);
    }
    Ok(files)
}

fn read_file(source: &mut Source<'_>) -> Result<FilePatch, DiffError> {
    let mut file = FilePatch {
        old: None,
        new: None,
        added: 0,
        removed: 0,
        is_binary: false,
        text: String::new(),
    };
    let mut paths = Paths::default();
    let mut is_special = false;
    if let Some(line) = source.peek()
        && let Some(both) = line.strip_prefix("diff --git ")
    {
        paths.both = lines::same_path(both);
        paths.first = Some(both.to_owned());
        file.text.push_str(line);
        file.text.push('\n');
        source.advance();
    }
    while let Some(line) = source.peek() {
        let header = match Header::of(line) {
            Some(header) => header,
            None if line.starts_with("@@ ") || line.starts_with("diff --git ") => break,
            None if line.starts_with("GIT binary patch") => {
                file.is_binary = true;
                source.skip_binary();
                break;
            }
            None if line.is_empty() => break,
            None => return Err(source.malformed()),
        };
        // A second file without a line of its own for it.
        if paths.new.is_some() && matches!(header, Header::Old(_)) {
            break;
        }
        is_special |= header.is_special();
        file.is_binary |= matches!(header, Header::Binary);
        paths.note(&header).ok_or_else(|| source.malformed())?;
        file.text.push_str(line);
        file.text.push('\n');
        source.advance();
    }
    while let Some(line) = source.peek() {
        if !line.starts_with("@@ ") {
            break;
        }
        read_hunk(source, &mut file)?;
    }
    // What `git format-patch` and editors leave between files.
    while source.peek().is_some_and(str::is_empty) {
        source.advance();
    }
    (file.old, file.new) = paths.settle().ok_or_else(|| source.malformed())?;
    for path in file.paths() {
        let path = path.to_owned();
        if !is_inside(&path) {
            return Err(DiffError::Outside { path });
        }
        if is_special {
            return Err(DiffError::Special { path });
        }
    }
    Ok(file)
}

fn read_hunk(source: &mut Source<'_>, file: &mut FilePatch) -> Result<(), DiffError> {
    let head = source.peek().unwrap_or_default();
    let (mut old, mut new) = lines::hunk_lengths(head).ok_or_else(|| source.malformed())?;
    let mut keep = |source: &mut Source<'_>, line: &str| {
        file.text.push_str(line);
        file.text.push('\n');
        source.advance();
    };
    keep(source, head);
    while old > 0 || new > 0 {
        let Some(line) = source.peek() else {
            return Err(source.malformed());
        };
        let (from_old, from_new) = match line.as_bytes().first() {
            Some(b' ') | None => (1, 1),
            Some(b'-') => (1, 0),
            Some(b'+') => (0, 1),
            Some(b'\\') => (0, 0),
            Some(_) => return Err(source.malformed()),
        };
        if from_old > old || from_new > new {
            return Err(source.malformed());
        }
        old -= from_old;
        new -= from_new;
        file.removed += usize::from(from_old > from_new);
        file.added += usize::from(from_new > from_old);
        // Editors drop the blank of a blank line.
        keep(source, if line.is_empty() { " " } else { line });
    }
    if let Some(line) = source.peek()
        && line.starts_with('\\')
    {
        keep(source, line);
    }
    Ok(())
}

/// Whether a path is a file's of a repository: relative, going down alone, and not git's own.
fn is_inside(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(|letter: char| letter.is_control() || letter == '\\')
        && path
            .split('/')
            .all(|part| !matches!(part, "" | "." | "..") && !part.eq_ignore_ascii_case(".git"))
}

/// Which files belong to the tests of a task.
#[derive(Debug, Clone, Default)]
pub struct TestPaths {
    /// Files that the task's tests change.
    changed: Vec<String>,
    /// Files that the reference changes, which are no tests whatever their names.
    reference: Vec<String>,
}

impl TestPaths {
    /// Takes the task's patch of the tests, and its reference.
    #[must_use]
    pub fn new(test_patch: &[FilePatch], reference: &[FilePatch]) -> Self {
        let paths = |files: &[FilePatch]| {
            let paths = files.iter().flat_map(FilePatch::paths);
            paths.map(str::to_owned).collect()
        };
        Self {
            changed: paths(test_patch),
            reference: paths(reference),
        }
    }

    /// Returns whether a file decides how tests go: a test, or what a test runner reads by itself.
    #[must_use]
    pub fn contain(&self, path: &str) -> bool {
        if self.changed.iter().any(|changed| changed == path) {
            return true;
        }
        if self.reference.iter().any(|reference| reference == path) {
            return false;
        }
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        let is_test_folder = |folder: &str| matches!(folder, "tests" | "testing");
        let is_beside_tests = self.changed.iter().any(|changed| {
            let folder = changed.rsplit_once('/').map_or("", |(folder, _)| folder);
            !folder.is_empty() && folder == folders
        });
        let is_read_by_itself = |folder: &str| {
            matches!(folder, "sitecustomize" | "usercustomize")
                || folder.ends_with(".dist-info")
                || folder.ends_with(".egg-info")
        };
        // What is imported from the repository's root in place of the runner, as a file or a package of any kind;
        // the runner's own repository has them.
        let first_of = |path: &str| path.split('/').next().unwrap_or_default().to_owned();
        let first = first_of(path);
        let module = first.split('.').next().unwrap_or_default();
        let is_mended = (self.reference.iter()).any(|reference| first_of(reference) == first);
        let stands_for_the_runner = path == "bin/test"
            || !is_mended
                && matches!(
                    module,
                    "pytest" | "_pytest" | "pluggy" | "iniconfig" | "toxfile"
                );
        folders.split('/').any(is_test_folder)
            || folders.split('/').any(is_read_by_itself)
            || stands_for_the_runner
            || is_beside_tests
            || matches!(
                name,
                "conftest.py"
                    | "sitecustomize.py"
                    | "usercustomize.py"
                    | "pytest.ini"
                    | ".pytest.ini"
                    | "tox.ini"
                    | "setup.cfg"
                    | "pyproject.toml"
            )
            || name.ends_with(".pth")
            || name.ends_with("_test.py")
            || name.starts_with("test_") && name.ends_with(".py")
    }
}

/// A patch, divided into what is applied and what is not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PatchSplit {
    /// The part to apply; empty where nothing is left.
    pub kept: String,
    /// Lines that it adds or removes.
    pub size: usize,
    /// Files of the tests, and files that are not text, whose changes are left out.
    pub dropped: Vec<String>,
}

/// Divides a policy's patch: changes to tests are left out, for they are restored anyway.
///
/// # Errors
///
/// As for [`parse_diff`].
pub fn split_patch(patch: &str, tests: &TestPaths) -> Result<PatchSplit, DiffError> {
    let mut split = PatchSplit::default();
    for file in parse_diff(patch)? {
        let dropped = file.is_binary || file.paths().any(|path| tests.contain(path));
        if dropped {
            let path = file.paths().last().unwrap_or_default();
            split.dropped.push(path.to_owned());
        } else {
            split.kept.push_str(&file.text);
            split.size += file.added + file.removed;
        }
    }
    Ok(split)
}

#[cfg(test)]
mod tests;
