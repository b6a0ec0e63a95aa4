//! Data sets by name: Harbor's registry file.
//!
//! A registry is a JSON list of data sets, each a `name`, a `version` and its `tasks`; a task is a
//! folder of a git repository at a commit, or a folder of this machine, relative to the file.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;

use super::HarborError;

/// The largest registry that is read: a million tasks take about as much.
const MAX_REGISTRY_BYTES: u64 = 256 << 20;

/// `harbor:NAME@VERSION`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetReference {
    /// The data set.
    pub name: String,
    /// Its version; the newest where none.
    pub version: Option<String>,
}

impl FromStr for DatasetReference {
    type Err = HarborError;

    fn from_str(text: &str) -> Result<Self, HarborError> {
        let wrong = || HarborError::Reference {
            text: text.to_owned(),
        };
        let rest = text.strip_prefix("harbor:").ok_or_else(wrong)?;
        let (name, version) = match rest.split_once('@') {
            Some((name, version)) => (name, Some(version)),
            None => (rest, None),
        };
        let is_name = |name: &str| {
            let parts: Vec<&str> = name.split('/').collect();
            parts.len() <= 2 && parts.into_iter().all(is_folder_name)
        };
        if !is_name(name) || version.is_some_and(str::is_empty) {
            return Err(wrong());
        }
        Ok(Self {
            name: name.to_owned(),
            version: version.map(str::to_owned),
        })
    }
}

impl fmt::Display for DatasetReference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            Some(version) => write!(formatter, "harbor:{}@{version}", self.name),
            None => write!(formatter, "harbor:{}", self.name),
        }
    }
}

pub(super) fn is_folder_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_')
        && name.len() <= 255
        && (name.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte))
}

/// A registry's data sets.
#[derive(Debug, Clone, PartialEq)]
pub struct Registry {
    pub(super) path: PathBuf,
    datasets: Vec<DatasetSpec>,
}

/// A data set at a version.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DatasetSpec {
    /// The name.
    pub name: String,
    /// The version; `head` is newer than any other.
    pub version: String,
    /// For people.
    #[serde(default)]
    pub description: String,
    /// The tasks.
    pub tasks: Vec<RegistryTask>,
}

/// Where a task is.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RegistryTask {
    /// The name.
    pub name: String,
    /// The repository; none for a folder of this machine.
    #[serde(default)]
    pub git_url: Option<String>,
    /// The commit, branch or tag; the repository's default branch where none.
    #[serde(default)]
    pub git_commit_id: Option<String>,
    /// The folder.
    pub path: String,
}

impl Registry {
    /// Reads a registry file.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be read, is too large or is not of the published form.
    pub fn read(path: &Path) -> Result<Self, HarborError> {
        let mut text = Vec::new();
        fs_err::File::open(path)
            .and_then(|file| file.take(MAX_REGISTRY_BYTES + 1).read_to_end(&mut text))
            .map_err(|source| HarborError::Io {
                path: path.to_owned(),
                source,
            })?;
        if text.len() as u64 > MAX_REGISTRY_BYTES {
            return Err(HarborError::TooLarge {
                path: path.to_owned(),
                what: "bytes",
                limit: MAX_REGISTRY_BYTES,
            });
        }
        let datasets = serde_json::from_slice(&text).map_err(|source| HarborError::Registry {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            path: path.to_owned(),
            datasets,
        })
    }

    /// Finds a data set; without a version `head`, else the highest, else the last by name.
    ///
    /// # Errors
    ///
    /// Fails where there is none of this name, or not in this version.
    pub fn find(&self, reference: &DatasetReference) -> Result<&DatasetSpec, HarborError> {
        let unknown = |what: String, mut names: Vec<&str>| {
            names.sort_unstable();
            names.dedup();
            let shown: Vec<String> = names
                .iter()
                .take(20)
                .map(|name| format!("`{name}`"))
                .collect();
            HarborError::Unknown {
                path: self.path.clone(),
                what,
                available: match shown.len() {
                    0 => "none".to_owned(),
                    _ => shown.join(", "),
                },
            }
        };
        let named: Vec<&DatasetSpec> = (self.datasets.iter())
            .filter(|spec| spec.name == reference.name)
            .collect();
        let newest = named.iter().max_by_key(|spec| rank(&spec.version));
        let Some(newest) = newest else {
            let names = self
                .datasets
                .iter()
                .map(|spec| spec.name.as_str())
                .collect();
            return Err(unknown(format!("data set `{}`", reference.name), names));
        };
        let Some(version) = &reference.version else {
            return Ok(newest);
        };
        // The last entry counts, as in Harbor.
        let found = named.iter().rev().find(|spec| spec.version == *version);
        found.copied().ok_or_else(|| {
            let what = format!("version `{version}` of `{}`", reference.name);
            unknown(
                what,
                named.iter().map(|spec| spec.version.as_str()).collect(),
            )
        })
    }
}

/// Orders versions: what is no version, versions by their numbers (a pre-release before its
/// release, a post-release after it), `head`.
fn rank(version: &str) -> (u8, Vec<u64>, i8, u64, &str) {
    if version == "head" {
        return (2, Vec::new(), 0, 0, version);
    }
    let text = version.strip_prefix('v').unwrap_or(version);
    let end = text
        .find(|letter: char| !letter.is_ascii_digit() && letter != '.')
        .unwrap_or(text.len());
    let (numbers, suffix) = text.split_at(end);
    let mut release = Vec::new();
    for number in numbers.trim_end_matches('.').split('.') {
        match number.parse() {
            Ok(number) => release.push(number),
            Err(_) => return (0, Vec::new(), 0, 0, version),
        }
    }
    while release.len() > 1 && release.last() == Some(&0) {
        release.pop(); // 1.0 is 1
    }
    let suffix = suffix.split('+').next().unwrap_or_default();
    let letters = suffix.trim_start_matches(['-', '_', '.']);
    let word = letters.trim_end_matches(|letter: char| !letter.is_ascii_alphabetic());
    let number = letters[word.len()..].trim_start_matches(['-', '_', '.']);
    let phase = match word {
        "" => 0,
        "post" | "rev" | "r" => 1,
        "rc" | "c" | "pre" | "preview" => -1,
        "b" | "beta" => -2,
        "a" | "alpha" => -3,
        "dev" => -4,
        _ => return (0, Vec::new(), 0, 0, version),
    };
    (1, release, phase, number.parse().unwrap_or_default(), "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_name_a_data_set() {
        let read = |text: &str| text.parse::<DatasetReference>();
        let reference = read("harbor:terminal-bench@2.0").unwrap();
        assert_eq!(reference.name, "terminal-bench");
        assert_eq!(reference.version.as_deref(), Some("2.0"));
        assert_eq!(read("harbor:owner/name").unwrap().version, None);
        for text in [
            "terminal-bench",
            "harbor:",
            "harbor:a@",
            "harbor:../a",
            "harbor:a/b/c",
            "harbor:-a",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_newest_version_is_head_then_by_number() {
        let newest = |versions: &[&str]| {
            let dataset = |version: &&str| DatasetSpec {
                name: "a".to_owned(),
                version: (*version).to_owned(),
                description: String::new(),
                tasks: Vec::new(),
            };
            let registry = Registry {
                path: PathBuf::from("registry.json"),
                datasets: versions.iter().map(dataset).collect(),
            };
            let reference = "harbor:a".parse().unwrap();
            registry.find(&reference).unwrap().version.clone()
        };
        assert_eq!(newest(&["9.0", "head", "10.0"]), "head");
        assert_eq!(newest(&["9.0", "10.0", "zeta"]), "10.0");
        assert_eq!(newest(&["1.0rc1", "1.0", "1.0.dev3"]), "1.0");
        assert_eq!(newest(&["1.0", "1.0.post1"]), "1.0.post1");
        assert_eq!(newest(&["v1.2", "1.1"]), "v1.2");
        assert_eq!(newest(&["beta", "alpha"]), "beta");
    }
}
