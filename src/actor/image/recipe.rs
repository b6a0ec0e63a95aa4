//! What an image is built from.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::workdir;
use crate::actor::{ActorError, Entry, FileTree, TreeLimits};

/// The file of a context that says how it is built.
const DOCKERFILE: &str = "Dockerfile";
/// Hexadecimal digits of a hash in a tag: 160 bits.
const DIGITS: usize = 40;

/// What an image is built from. A build runs what it says, so it has to come from whom one trusts: a task, and
/// never a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// The files that the build sees.
    pub context: FileTree,
    /// Which of them says how.
    pub dockerfile: PathBuf,
}

impl Recipe {
    /// Whether a folder has a `Dockerfile`.
    #[must_use]
    pub fn is_in(folder: &Path) -> bool {
        folder.join(DOCKERFILE).is_file()
    }

    /// Reads a folder with a `Dockerfile`, whose files may have `max_bytes` together.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be read, is larger, or has no `Dockerfile` of its own.
    pub fn read(folder: &Path, max_bytes: u64) -> Result<Self, ActorError> {
        let limits = TreeLimits {
            bytes: max_bytes,
            ..TreeLimits::default()
        };
        let context = FileTree::read_from(folder, limits).map_err(|error| match error {
            ActorError::TreeTooLarge { limit, unit } => ActorError::InvalidSpec {
                reason: format!(
                    "the build context `{}` has more than {limit} {unit}; have its build fetch what is large",
                    folder.display()
                ),
            },
            other => other,
        })?;
        if context.file(DOCKERFILE).is_none() {
            return Err(ActorError::InvalidSpec {
                reason: format!("`{}` has no file `{DOCKERFILE}`", folder.display()),
            });
        }
        Ok(Self {
            context,
            dockerfile: DOCKERFILE.into(),
        })
    }

    /// Returns the recipe of what an image is by itself.
    ///
    /// # Errors
    ///
    /// Fails where the name could be anything but one.
    pub fn of_image(image: &str) -> Result<Self, ActorError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@[]".contains(&byte);
        if image.is_empty() || !image.bytes().all(is_plain) || image.starts_with('-') {
            return Err(ActorError::InvalidSpec {
                reason: format!("`{image}` is not the name of an image"),
            });
        }
        Ok(Self {
            context: FileTree::of_file(DOCKERFILE, format!("FROM {image}\n"))?,
            dockerfile: DOCKERFILE.into(),
        })
    }

    /// Returns a name for what it builds, good as a tag and as the name of a folder: a hash of all that the
    /// build sees. What the build fetches has no part in it.
    #[must_use]
    pub fn tag(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("wardian 2026-12 context of an image");
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        add(self.dockerfile.as_os_str().as_bytes());
        for (path, entry) in self.context.iter() {
            add(path.as_os_str().as_bytes());
            match entry {
                Entry::Folder => add(b"folder"),
                Entry::File { bytes, executable } => {
                    add(if *executable { b"program" } else { b"file" });
                    add(bytes);
                }
                Entry::Link { target } => {
                    add(b"link");
                    add(target.as_os_str().as_bytes());
                }
            }
        }
        let hash = hasher.finalize().to_hex();
        format!("context-{}", hash.get(..DIGITS).unwrap_or(&hash))
    }

    /// Returns the folder that programs start in by the recipe's own words; none where these leave it to the
    /// image that it is built from, or to a variable.
    #[must_use]
    pub fn workdir(&self) -> Option<PathBuf> {
        let text = self.context.file(&self.dockerfile)?;
        workdir::of(&String::from_utf8_lossy(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(files: &[(&str, &str)]) -> Recipe {
        let mut context = FileTree::new();
        for (path, text) in files {
            let file = Entry::File {
                bytes: text.as_bytes().to_vec(),
                executable: false,
            };
            context.insert(*path, file).unwrap();
        }
        Recipe {
            context,
            dockerfile: DOCKERFILE.into(),
        }
    }

    #[test]
    fn a_tag_is_of_all_that_a_build_sees() {
        let plain = recipe(&[("Dockerfile", "FROM a\n"), ("x", "1")]);
        let tag = plain.tag();
        assert_eq!(tag, plain.tag());
        assert_eq!(tag.len(), "context-".len() + DIGITS);
        let image = format!("registry.example.org/tasks:{tag}");
        let image: super::super::ImageReference = image.parse().unwrap();
        assert_eq!(image.reference(), tag);
        let mut others = vec![
            recipe(&[("Dockerfile", "FROM a\n"), ("x", "2")]),
            recipe(&[("Dockerfile", "FROM a\n"), ("y", "1")]),
            recipe(&[("Dockerfile", "FROM b\n"), ("x", "1")]),
            recipe(&[("Dockerfile", "FROM a\n")]),
            // The same bytes, divided otherwise.
            recipe(&[("Dockerfile", "FROM a\n"), ("x1", "")]),
            Recipe {
                dockerfile: "x".into(),
                ..plain
            },
        ];
        for entry in [
            Entry::Folder,
            Entry::Link { target: "1".into() },
            Entry::File {
                bytes: b"1".to_vec(),
                executable: true,
            },
        ] {
            let mut other = recipe(&[("Dockerfile", "FROM a\n")]);
            other.context.insert("x", entry).unwrap();
            others.push(other);
        }
        let mut tags: Vec<String> = others.iter().map(Recipe::tag).collect();
        tags.push(tag);
        tags.sort();
        tags.dedup();
        assert_eq!(tags.len(), others.len() + 1);
    }

    #[test]
    fn a_folder_is_read_within_its_bounds() {
        let folder = tempfile::tempdir().unwrap();
        let error = Recipe::read(folder.path(), 100).unwrap_err().to_string();
        assert!(error.contains("has no file `Dockerfile`"), "{error}");
        fs_err::write(folder.path().join("Dockerfile"), "FROM scratch\n").unwrap();
        fs_err::write(folder.path().join("data"), vec![0; 80]).unwrap();
        assert!(Recipe::is_in(folder.path()));
        let read = Recipe::read(folder.path(), 100).unwrap();
        assert_eq!(read.context.len(), 2);
        let error = Recipe::read(folder.path(), 90).unwrap_err().to_string();
        assert!(error.contains("more than 90 bytes"), "{error}");
    }

    #[test]
    fn the_name_of_an_image_says_nothing_else() {
        let recipe = Recipe::of_image("registry.example.org:5000/a/b_c:1@sha256:00").unwrap();
        let text = recipe.context.file("Dockerfile").unwrap();
        assert_eq!(text, b"FROM registry.example.org:5000/a/b_c:1@sha256:00\n");
        for image in ["", "a\nRUN true", "a AS b", "--platform=x", "$a", "a#"] {
            Recipe::of_image(image).unwrap_err();
        }
    }
}
