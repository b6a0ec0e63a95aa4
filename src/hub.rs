//! The only caller of `hf-hub`: repository and revision to a local path.
//!
//! Files land in the cache that the Python tools use. The environment is theirs as well:
//! `HF_HOME` or `HF_HUB_CACHE` (where the cache is), `HF_HUB_OFFLINE` (cache only), `HF_TOKEN`
//! (else the token file of `hf auth login`), `HF_ENDPOINT`.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

/// Failed downloads are tried again this often.
const RETRIES: usize = 3;

/// Most of an index of shards that is read; one with 90,000 tensors has 9 MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Something that could not be had from the hub.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The text names no repository.
    #[error("`{text}` is not a repository name; expected `owner/name` or `owner/name@revision`")]
    InvalidRepository {
        /// What was given.
        text: String,
    },
    /// A file name reaches outside the repository.
    #[error("`{file}` is not a file inside a repository")]
    InvalidFile {
        /// What was given.
        file: String,
    },
    /// The file is not in the cache, and the network is off limits.
    #[error(
        "`{file}` of `{repository}` is not in the cache `{cache}` and `HF_HUB_OFFLINE` is set; \
         unset it or download the file first"
    )]
    Offline {
        /// The repository.
        repository: HubRepo,
        /// The file.
        file: String,
        /// The cache that was searched.
        cache: PathBuf,
    },
    /// The hub could not be reached or said no.
    #[error(
        "failed to fetch `{file}` of `{repository}`; check the name, the network and, for gated \
         repositories, `HF_TOKEN`"
    )]
    Fetch {
        /// The repository.
        repository: HubRepo,
        /// The file, or what else was asked for.
        file: String,
        /// The client's reason.
        #[source]
        source: Box<ApiError>,
    },
    /// An index of weights cannot be read.
    #[error("failed to read the shards' names in `{path}`; is the download complete?")]
    Index {
        /// The index file.
        path: PathBuf,
    },
    /// The repository has no such file.
    #[error("`{repository}` has no file `{file}`")]
    NoSuchFile {
        /// The repository.
        repository: HubRepo,
        /// The file.
        file: String,
    },
}

/// A repository at a revision: `owner/name` or `owner/name@revision`.
///
/// ```
/// use wardian::hub::HubRepo;
///
/// let repository: HubRepo = "Qwen/Qwen3-0.6B@main".parse()?;
/// assert_eq!(repository.name, "Qwen/Qwen3-0.6B");
/// assert!("../etc/passwd".parse::<HubRepo>().is_err());
/// # Ok::<(), wardian::hub::HubError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HubRepo {
    /// `owner/name`.
    pub name: String,
    /// Branch, tag or commit. Default: `main`.
    pub revision: String,
}

impl FromStr for HubRepo {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let is_part = |part: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            (1..=96).contains(&part.len()) && part.chars().all(allowed) && !part.starts_with('.')
        };
        let is_name = name
            .split_once('/')
            .is_some_and(|(a, b)| is_part(a) && is_part(b));
        if !is_name || !revision.split('/').all(is_part) {
            return Err(HubError::InvalidRepository {
                text: text.to_owned(),
            });
        }
        Ok(Self {
            name: name.to_owned(),
            revision: revision.to_owned(),
        })
    }
}

impl fmt::Display for HubRepo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
        }
        Ok(())
    }
}

/// What a repository holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubRepoKind {
    /// Weights and tokenizers.
    Model,
    /// Data sets.
    Dataset,
}

/// What the hub says to who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubAnswer {
    /// Its address.
    pub endpoint: String,
    /// What it says of the token.
    pub token: HubToken,
    /// The time that it has, as its answer's `Date` says it.
    pub date: Option<String>,
}

/// What the hub says of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HubToken {
    /// There is none.
    Absent,
    /// It is that of an account.
    Valid {
        /// The account's name.
        account: String,
    },
    /// It was refused, with this status.
    Refused {
        /// The status.
        status: u16,
    },
    /// The hub answered something else, with this status.
    Unknown {
        /// The status.
        status: u16,
    },
}

/// Largest answer about an account that is read.
const MAX_ACCOUNT_BYTES: u64 = 1 << 20;

/// A cache of the hub's files, with or without the hub behind it.
#[derive(Clone)]
pub struct Hub {
    cache: Cache,
    token: Option<String>,
    offline: bool,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("cache", self.cache.path())
            .field("has_token", &self.token.is_some())
            .field("offline", &self.offline)
            .finish()
    }
}

impl Hub {
    /// Returns the hub that the environment describes.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(read: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| read(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let home = path("HF_HOME").or_else(|| {
            let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
            Some(cache?.join("huggingface"))
        });
        let folder = path("HF_HUB_CACHE").or_else(|| Some(home.as_ref()?.join("hub")));
        let cache = folder.map_or_else(Cache::default, Cache::new);
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        let stored = || {
            let text = fs_err::read_to_string(token_file?).ok()?;
            Some(text.trim().to_owned()).filter(|token| !token.is_empty())
        };
        let is_true = |value: String| {
            matches!(
                value.to_ascii_lowercase().as_str(),
                "1" | "true" | "yes" | "on"
            )
        };
        Self {
            token: set("HF_TOKEN").or_else(stored),
            offline: set("HF_HUB_OFFLINE").is_some_and(is_true),
            cache,
        }
    }

    /// Returns a hub that only reads the cache in `folder`.
    pub fn offline(folder: impl Into<PathBuf>) -> Self {
        Self {
            cache: Cache::new(folder.into()),
            token: None,
            offline: true,
        }
    }

    /// Returns the local path of a file, downloading it if it is not in the cache.
    ///
    /// Blocks on the network: minutes for weights.
    ///
    /// # Errors
    ///
    /// Fails if the file is neither in the cache nor to be had.
    pub fn file(
        &self,
        repository: &HubRepo,
        kind: HubRepoKind,
        file: &str,
    ) -> Result<PathBuf, HubError> {
        check_file(file)?;
        if let Some(path) = self.cached(repository, kind, file) {
            return Ok(path);
        }
        if self.offline {
            return Err(HubError::Offline {
                repository: repository.clone(),
                file: file.to_owned(),
                cache: self.cache.path().clone(),
            });
        }
        tracing::info!(repository = %repository, file, "downloading from the hub");
        let watched = Watched {
            file,
            done: 0,
            total: 0,
        };
        let fetched =
            (self.api(repository, kind)).and_then(|api| api.download_with_progress(file, watched));
        fetched.map_err(|source| fetch_error(repository, file, source))
    }

    /// Returns the names of a repository's files: the hub's list, or offline what the cache holds
    /// at the top level.
    ///
    /// # Errors
    ///
    /// Fails if the hub cannot be reached, or offline if the cache knows nothing of the revision.
    pub fn files(&self, repository: &HubRepo, kind: HubRepoKind) -> Result<Vec<String>, HubError> {
        if !self.offline {
            let info = self.api(repository, kind).and_then(|api| api.info());
            let info = info.map_err(|source| fetch_error(repository, "(list of files)", source))?;
            return Ok(info
                .siblings
                .into_iter()
                .map(|sibling| sibling.rfilename)
                .collect());
        }
        let missing = || HubError::Offline {
            repository: repository.clone(),
            file: "(list of files)".to_owned(),
            cache: self.cache.path().clone(),
        };
        let snapshot = self.snapshot(repository, kind).ok_or_else(missing)?;
        let mut names = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let entries = fs_err::read_dir(snapshot.join(&folder)).map_err(|_| missing())?;
            for entry in entries.flatten() {
                let Ok(name) = entry.file_name().into_string() else {
                    continue;
                };
                let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
                let path = format!("{folder}{name}");
                if is_folder {
                    folders.push(format!("{path}/"));
                } else {
                    names.push(path);
                }
            }
        }
        names.sort();
        Ok(names)
    }

    /// Brings a model's configuration, tokenizer and safetensors weights, and returns the folder
    /// that holds them.
    ///
    /// # Errors
    ///
    /// Fails if the repository lacks `config.json` or weights, or if a download fails.
    pub fn model_folder(&self, repository: &HubRepo) -> Result<PathBuf, HubError> {
        const KIND: HubRepoKind = HubRepoKind::Model;
        let names = self.files(repository, KIND)?;
        let has = |file: &str| names.iter().any(|name| name == file);
        let mut config = self.file(repository, KIND, "config.json")?;
        for optional in [
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ] {
            if has(optional) {
                self.file(repository, KIND, optional)?;
            }
        }
        const INDEX: &str = "model.safetensors.index.json";
        if has(INDEX) {
            let index = self.file(repository, KIND, INDEX)?;
            for shard in shards(&index)? {
                self.file(repository, KIND, &shard)?;
            }
        } else if has("model.safetensors") {
            self.file(repository, KIND, "model.safetensors")?;
        } else {
            return Err(HubError::NoSuchFile {
                repository: repository.clone(),
                file: "model.safetensors".to_owned(),
            });
        }
        // A file lies in a folder, so `pop` always finds one.
        config.pop();
        Ok(config)
    }

    /// Downloads the task files of a dataset (JSON, JSON Lines, parquet) that are not in the cache
    /// yet, and returns the folder that holds them.
    ///
    /// # Errors
    ///
    /// Fails if the repository holds no such file, or if a download fails.
    pub fn dataset_folder(&self, repository: &HubRepo) -> Result<PathBuf, HubError> {
        const KIND: HubRepoKind = HubRepoKind::Dataset;
        let is_data = |name: &&String| {
            [".json", ".jsonl", ".parquet"]
                .iter()
                .any(|ending| name.ends_with(ending))
        };
        let names = self.files(repository, KIND)?;
        let mut folder = None;
        for name in names.iter().filter(is_data) {
            let path = self.file(repository, KIND, name)?;
            let depth = name.split('/').count();
            folder = path.ancestors().nth(depth).map(Path::to_path_buf);
        }
        folder.ok_or_else(|| HubError::NoSuchFile {
            repository: repository.clone(),
            file: "*.parquet".to_owned(),
        })
    }

    /// Returns the folder of the cache.
    #[must_use]
    pub fn cache_folder(&self) -> &Path {
        self.cache.path()
    }

    /// Returns whether only the cache is read.
    #[must_use]
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// Asks the hub whose token this is, or without one whether it is there.
    ///
    /// # Errors
    ///
    /// Fails where it does not answer within `limit`.
    pub fn ask(&self, limit: Duration) -> Result<HubAnswer, Box<ureq::Error>> {
        let endpoint = self.endpoint();
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(limit))
            .http_status_as_error(false);
        let agent = ureq::Agent::new_with_config(config.build());
        let mut request = agent.get(format!("{endpoint}/api/whoami-v2"));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut answer = request.call().map_err(Box::new)?;
        let date = answer.headers().get("date");
        let date = date.and_then(|date| Some(date.to_str().ok()?.to_owned()));
        let status = answer.status().as_u16();
        let account = |answer: &mut ureq::http::Response<ureq::Body>| {
            let body = answer.body_mut().with_config().limit(MAX_ACCOUNT_BYTES);
            let body: serde_json::Value = body.read_json().ok()?;
            Some(body.get("name")?.as_str()?.to_owned())
        };
        let token = match (&self.token, status) {
            (None, _) => HubToken::Absent,
            (Some(_), 401 | 403) => HubToken::Refused { status },
            (Some(_), _) => match account(&mut answer) {
                Some(account) => HubToken::Valid { account },
                None => HubToken::Unknown { status },
            },
        };
        Ok(HubAnswer {
            endpoint,
            token,
            date,
        })
    }

    /// Returns the hub's address, as its client has it.
    fn endpoint(&self) -> String {
        let repository = HubRepo {
            name: "owner/name".to_owned(),
            revision: "main".to_owned(),
        };
        let url = self.api(&repository, HubRepoKind::Model);
        let url = url.map(|api| api.url("file")).unwrap_or_default();
        let end = url.find("/owner/name").unwrap_or(url.len());
        url[..end].to_owned()
    }

    fn cached(&self, repository: &HubRepo, kind: HubRepoKind, file: &str) -> Option<PathBuf> {
        let path = self.snapshot(repository, kind)?.join(file);
        path.exists().then_some(path)
    }

    /// Returns the folder of a revision's files, if the cache has one.
    fn snapshot(&self, repository: &HubRepo, kind: HubRepoKind) -> Option<PathBuf> {
        let folder = self
            .cache
            .path()
            .join(to_repo(repository, kind).folder_name());
        // A branch or a tag is a file with the commit; a commit is a snapshot's own name.
        let reference = folder.join("refs").join(&repository.revision);
        let commit = fs_err::read_to_string(reference);
        let commit = commit.unwrap_or_else(|_| repository.revision.clone());
        let commit = commit.trim();
        let is_name = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric());
        let snapshot = folder.join("snapshots").join(commit);
        (is_name && snapshot.is_dir()).then_some(snapshot)
    }

    fn api(&self, repository: &HubRepo, kind: HubRepoKind) -> Result<ApiRepo, ApiError> {
        let mut builder = ApiBuilder::from_env()
            .with_cache_dir(self.cache.path().clone())
            .with_token(self.token.clone())
            .with_retries(RETRIES)
            // The client's bar would write to the terminal by itself.
            .with_progress(false);
        builder = builder.with_user_agent("wardian", env!("CARGO_PKG_VERSION"));
        Ok(builder.build()?.repo(to_repo(repository, kind)))
    }
}

/// How far a download is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Download<'a> {
    /// The file.
    pub file: &'a str,
    /// Bytes that are there.
    pub done: u64,
    /// All of them.
    pub total: u64,
}

type Watcher = Box<dyn Fn(Download<'_>) + Send + Sync>;

/// Who shows downloads: whatever part of the program begins them, the terminal is one.
static WATCHER: OnceLock<Watcher> = OnceLock::new();

/// Lets `watcher` know how far each download of this process is. The first one that is named stays.
pub fn watch_downloads(watcher: impl Fn(Download<'_>) + Send + Sync + 'static) {
    // Who comes second is not told.
    let _ = WATCHER.set(Box::new(watcher));
}

/// A download that is watched.
struct Watched<'a> {
    file: &'a str,
    done: u64,
    total: u64,
}

impl Watched<'_> {
    fn tell(&self) {
        if let Some(watcher) = WATCHER.get() {
            watcher(Download {
                file: self.file,
                done: self.done,
                total: self.total,
            });
        }
    }
}

impl Progress for Watched<'_> {
    fn init(&mut self, size: usize, _file: &str) {
        self.total = size as u64;
        self.tell();
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        self.tell();
    }

    fn finish(&mut self) {
        self.done = self.total;
        self.tell();
    }
}

fn to_repo(repository: &HubRepo, kind: HubRepoKind) -> Repo {
    let kind = match kind {
        HubRepoKind::Model => RepoType::Model,
        HubRepoKind::Dataset => RepoType::Dataset,
    };
    Repo::with_revision(repository.name.clone(), kind, repository.revision.clone())
}

/// Returns the files that an index of shards names.
fn shards(index: &Path) -> Result<BTreeSet<String>, HubError> {
    let damaged = || HubError::Index {
        path: index.to_owned(),
    };
    let file = fs_err::File::open(index).map_err(|_| damaged())?;
    let mut bytes = Vec::new();
    (file.take(MAX_INDEX_BYTES).read_to_end(&mut bytes)).map_err(|_| damaged())?;
    let index: serde_json::Value = serde_json::from_slice(&bytes).map_err(|_| damaged())?;
    let map = index.get("weight_map").and_then(|map| map.as_object());
    let shards = map.ok_or_else(damaged)?.values();
    (shards
        .map(|shard| Some(shard.as_str()?.to_owned()))
        .collect::<Option<_>>())
    .ok_or_else(damaged)
}

fn check_file(file: &str) -> Result<(), HubError> {
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    if !file.split('/').all(is_plain) || file.contains('\\') {
        return Err(HubError::InvalidFile {
            file: file.to_owned(),
        });
    }
    Ok(())
}

fn fetch_error(repository: &HubRepo, file: &str, source: ApiError) -> HubError {
    HubError::Fetch {
        repository: repository.clone(),
        file: file.to_owned(),
        source: Box::new(source),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Lays a cache out as the Python tools do.
    fn cache_with(files: &[&str]) -> tempfile::TempDir {
        let cache = tempfile::tempdir().unwrap();
        let repository = cache.path().join("models--owner--toy");
        fs_err::create_dir_all(repository.join("refs")).unwrap();
        fs_err::create_dir_all(repository.join("snapshots/abc")).unwrap();
        fs_err::write(repository.join("refs/main"), "abc").unwrap();
        for file in files {
            fs_err::write(repository.join("snapshots/abc").join(file), "{}").unwrap();
        }
        cache
    }

    #[test]
    fn a_cached_dataset_is_found_in_its_subfolders() {
        let cache = tempfile::tempdir().unwrap();
        let repository = cache.path().join("datasets--owner--tasks");
        fs_err::create_dir_all(repository.join("refs")).unwrap();
        fs_err::create_dir_all(repository.join("snapshots/abc/sanitized")).unwrap();
        fs_err::write(repository.join("refs/main"), "abc").unwrap();
        let file = "sanitized/train-00000-of-00001.parquet";
        fs_err::write(repository.join("snapshots/abc").join(file), "x").unwrap();
        let hub = Hub::offline(cache.path());
        let folder = hub.dataset_folder(&"owner/tasks".parse().unwrap()).unwrap();
        assert!(folder.join(file).is_file(), "{}", folder.display());
    }

    #[test]
    fn cached_files_are_found_without_the_network() {
        let cache = cache_with(&["config.json", "model.safetensors", "tokenizer.json"]);
        let hub = Hub::offline(cache.path());
        let repository = "owner/toy".parse().unwrap();
        let folder = hub.model_folder(&repository).unwrap();
        assert!(folder.join("model.safetensors").exists());
        let error = hub
            .file(&repository, HubRepoKind::Model, "other.json")
            .unwrap_err();
        assert!(matches!(error, HubError::Offline { .. }), "{error}");
        let error = hub
            .files(&"owner/none".parse().unwrap(), HubRepoKind::Model)
            .unwrap_err();
        assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    }

    #[test]
    fn every_shard_of_the_index_is_wanted() {
        let cache = cache_with(&["config.json", "a.safetensors"]);
        let snapshot = cache.path().join("models--owner--toy/snapshots/abc");
        let index = snapshot.join("model.safetensors.index.json");
        let hub = Hub::offline(cache.path());
        let repository: HubRepo = "owner/toy".parse().unwrap();
        let map = r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#;
        fs_err::write(&index, map).unwrap();
        let message = hub.model_folder(&repository).unwrap_err().to_string();
        assert!(message.starts_with("`b.safetensors` of `owner/toy` is not in the cache"));
        fs_err::write(snapshot.join("b.safetensors"), "").unwrap();
        assert_eq!(hub.model_folder(&repository).unwrap(), snapshot);
        for damaged in ["{", "{}", r#"{"weight_map": {"x": 1}}"#] {
            fs_err::write(&index, damaged).unwrap();
            let error = hub.model_folder(&repository).unwrap_err();
            assert!(matches!(error, HubError::Index { .. }), "{error}");
        }
        fs_err::write(&index, r#"{"weight_map": {"x": "../a"}}"#).unwrap();
        let error = hub.model_folder(&repository).unwrap_err();
        assert!(matches!(error, HubError::InvalidFile { .. }), "{error}");
    }

    #[test]
    fn a_commit_names_its_snapshot() {
        let cache = cache_with(&["config.json"]);
        let hub = Hub::offline(cache.path());
        let file = |name: &str| {
            let repository = name.parse().unwrap();
            hub.file(&repository, HubRepoKind::Model, "config.json")
        };
        assert_eq!(file("owner/toy@abc").unwrap(), file("owner/toy").unwrap());
        file("owner/toy@def").unwrap_err();
        // A reference that leads elsewhere leads nowhere.
        let reference = cache.path().join("models--owner--toy/refs/main");
        fs_err::write(reference, "../snapshots/abc").unwrap();
        file("owner/toy").unwrap_err();
    }

    #[test]
    fn the_environment_is_that_of_the_python_tools() {
        let home = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(home.path().join("huggingface")).unwrap();
        fs_err::write(home.path().join("huggingface/token"), "hf_stored\n").unwrap();
        let hub = |variables: &[(&str, &str)]| {
            let home = home.path().to_string_lossy().into_owned();
            Hub::from_variables(|name| {
                let found = variables.iter().find(|(known, _)| *known == name);
                let found = found.map(|(_, value)| (*value).to_owned());
                found.or_else(|| (name == "XDG_CACHE_HOME").then(|| home.clone()))
            })
        };
        let plain = hub(&[]);
        assert_eq!(*plain.cache.path(), home.path().join("huggingface/hub"));
        assert_eq!(plain.token.as_deref(), Some("hf_stored"));
        assert!(!plain.offline);
        let own = hub(&[("HF_HOME", "/models"), ("HF_TOKEN", "hf_own")]);
        assert_eq!(*own.cache.path(), Path::new("/models/hub"));
        assert_eq!(own.token.as_deref(), Some("hf_own"));
        let offline = hub(&[
            ("HF_HUB_CACHE", "/cache"),
            ("HF_HOME", "/models"),
            ("HF_HUB_OFFLINE", "1"),
        ]);
        assert_eq!(*offline.cache.path(), Path::new("/cache"));
        assert_eq!((offline.token, offline.offline), (None, true));
    }

    #[test]
    fn a_repository_without_weights_is_refused() {
        let cache = cache_with(&["config.json"]);
        let error = Hub::offline(cache.path())
            .model_folder(&"owner/toy".parse().unwrap())
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "`owner/toy` has no file `model.safetensors`"
        );
    }

    #[rstest]
    #[case("name")]
    #[case("a/b/c")]
    #[case("../b")]
    #[case("a/..")]
    #[case("a/b@")]
    #[case("a/b@../x")]
    #[case("/b")]
    #[case("a b/c")]
    fn names_that_reach_elsewhere_are_refused(#[case] text: &str) {
        assert!(matches!(
            text.parse::<HubRepo>(),
            Err(HubError::InvalidRepository { .. })
        ));
    }

    #[test]
    fn files_outside_the_repository_are_refused() {
        let hub = Hub::offline("/nonexistent");
        for file in ["../x", "a//b", "/etc/passwd", "a\\b", ""] {
            let error = hub.file(&"a/b".parse().unwrap(), HubRepoKind::Dataset, file);
            assert!(matches!(error, Err(HubError::InvalidFile { .. })), "{file}");
        }
    }

    #[test]
    fn the_token_is_not_printed() {
        let hub = Hub {
            cache: Cache::new("/tmp".into()),
            token: Some("hf_secret".to_owned()),
            offline: false,
        };
        assert!(!format!("{hub:?}").contains("hf_secret"));
    }
}
