//! Images of tasks that have to be built: what does it, and where they are kept.

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::actor::require_time;
use super::validate::Issues;
use super::{ActorBackendName, ActorConfig, units};
use crate::address::shown;

/// Images of tasks that have none, or whose image is not there. With backends of a cluster jobs ask `BuildKit` for
/// them, which pushes them to a registry; on this machine `buildah` builds them, which has to be installed. A
/// build runs what the task's `Dockerfile` says, with a network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ImageBuildConfig {
    /// In a cluster: the repository that images are pushed to and pulled from, such as
    /// `registry.example.org/team/tasks`; has to be given there. Tags are hashes of what an image is built from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registry: Option<String>,
    /// In a cluster: whether the registry is reached without TLS, such as one of the cluster's own; with TLS unless
    /// given.
    pub plain_http: bool,
    /// In a cluster: the user that the registry is asked as whether it has an image; nobody unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registry_user: Option<String>,
    /// In a cluster: a file with that user's password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registry_password_file: Option<PathBuf>,
    /// In a cluster: the secret of the type `kubernetes.io/dockerconfigjson`, in the namespace of the actors, by
    /// which images are pushed; none unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub push_secret: Option<String>,
    /// In a cluster: where `BuildKit` listens; `tcp://buildkit:1234` unless given.
    pub buildkit: String,
    /// In a cluster: an image with `buildctl`, a shell and `tar`; `moby/buildkit:v0.24.0-rootless` unless given.
    pub client_image: String,
    /// In a cluster: how often a build that fails is tried again by its job; 2 unless given.
    pub retries: u32,
    /// How long a build may take; 30m unless given. No agent's time runs meanwhile.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub timeout: Duration,
    /// On this machine: where root filesystems are kept, and what builds start from; `images` in the cache folder
    /// unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
    /// On this machine: what one root filesystem may hold; 16GiB unless given.
    #[serde(with = "units::byte_size")]
    #[schemars(with = "units::SizeText")]
    pub max_size: ByteSize,
    /// On this machine: whether builds have a network; they do unless given. Without one, what they start from has
    /// to be in `folder`.
    pub network: bool,
}

impl Default for ImageBuildConfig {
    fn default() -> Self {
        Self {
            registry: None,
            plain_http: false,
            registry_user: None,
            registry_password_file: None,
            push_secret: None,
            buildkit: "tcp://buildkit:1234".to_owned(),
            client_image: "moby/buildkit:v0.24.0-rootless".to_owned(),
            retries: 2,
            timeout: Duration::from_mins(30),
            folder: None,
            max_size: ByteSize::gib(16),
            network: true,
        }
    }
}

/// The most often that a build may be tried again.
const MAX_RETRIES: u32 = 10;

/// Checks what a run says of builds.
pub(super) fn validate(actor: &ActorConfig, builds: &ImageBuildConfig, issues: &mut Issues) {
    let key = |key: &str| format!("actor.image_build.{key}");
    let stand_in = actor.root.as_deref().or(actor.image.as_deref());
    issues.require(
        stand_in.is_none(),
        "actor.image_build".to_owned(),
        stand_in.unwrap_or_default(),
        "leave it out, or `actor.root` and `actor.image`: those stand in for the images of all tasks, and none would \
         be built",
    );
    issues.require(
        actor.backend != ActorBackendName::Substrate,
        "actor.image_build".to_owned(),
        actor.backend.as_str(),
        "leave it out: templates of Substrate name their images by digests, and none is built for them",
    );
    let is_cluster = matches!(
        actor.backend,
        ActorBackendName::Kruise | ActorBackendName::AgentSandbox
    );
    let registry = builds.registry.as_deref();
    issues.require(
        registry.map_or(!is_cluster, is_repository),
        key("registry"),
        registry.map(shown).unwrap_or_default(),
        "give a registry and a path in it, in lower case and without a tag, such as `registry.example.org/team/tasks`",
    );
    issues.require(
        builds.registry_user.is_some() == builds.registry_password_file.is_some(),
        key("registry_user"),
        builds.registry_user.as_deref().unwrap_or_default(),
        "give both, or leave out both: `registry_user` and `registry_password_file`",
    );
    issues.require(
        builds.buildkit.starts_with("tcp://")
            && builds.buildkit.len() > "tcp://".len()
            && builds.buildkit.bytes().all(|byte| byte.is_ascii_graphic()),
        key("buildkit"),
        shown(&builds.buildkit),
        "make it `tcp://HOST:PORT`",
    );
    issues.require(
        !builds.client_image.is_empty(),
        key("client_image"),
        "",
        "name an image with `buildctl`, a shell and `tar`",
    );
    issues.require(
        builds.retries <= MAX_RETRIES,
        key("retries"),
        builds.retries,
        "make it at most 10",
    );
    require_time(issues, key("timeout"), builds.timeout);
    issues.require(
        (ByteSize::mib(1)..=ByteSize::tib(1)).contains(&builds.max_size),
        key("max_size"),
        builds.max_size,
        "make it from 1MiB to 1TiB",
    );
}

/// Whether a text names a registry and a repository in it.
fn is_repository(text: &str) -> bool {
    let Some((host, path)) = text.split_once('/') else {
        return false;
    };
    let is_host = host == "localhost" || host.contains(['.', ':']);
    let is_plain = |part: &str, more: &[u8]| {
        let mut bytes = part.bytes();
        !part.is_empty()
            && bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || more.contains(&b))
    };
    let is_part = |part: &str| is_plain(part, b"._-") && !matches!(part, "." | "..");
    is_host
        && is_plain(&host.to_ascii_lowercase(), b".-:[]")
        && text.len() <= 200
        && path.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigError, RunConfig};

    fn load(text: &str) -> Result<RunConfig, ConfigError> {
        let text = format!("model.path = 'm'\ntask.path = 't'\n[actor]\n{text}");
        RunConfig::from_toml::<&str>(&text, &[])
    }

    #[test]
    fn builds_read_back() {
        let config = load(
            "backend = 'kruise'\n[actor.image_build]\nregistry = 'registry.example.org:5000/team/tasks'\n\
             push_secret = 's'\nplain_http = true\ntimeout = '10m'\nretries = 0\nregistry_user = 'u'\n\
             registry_password_file = 'p'\nbuildkit = 'tcp://b:1'",
        )
        .unwrap();
        let builds = config.actor.image_build.as_ref().unwrap();
        assert_eq!(builds.timeout, Duration::from_mins(10));
        let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(config, again);
        // Nothing is built unasked, and on this machine nothing more needs to be said.
        assert_eq!(load("").unwrap().actor.image_build, None);
        let config = load("[actor.image_build]").unwrap();
        assert_eq!(config.actor.image_build, Some(ImageBuildConfig::default()));
        let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(config, again);
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_key() {
        let registry = "actor.image_build.registry";
        for (text, key) in [
            ("backend = 'kruise'\nimage_build = {}", registry),
            ("backend = 'agent-sandbox'\nimage_build = {}", registry),
            ("root = 'host'\nimage_build = {}", "actor.image_build"),
            (
                "backend = 'kruise'\nimage = 'a:1'\nimage_build.registry = 'r.example.org/a'",
                "actor.image_build",
            ),
            ("image_build.registry = 'tasks'", registry),
            ("image_build.registry = 'r.example.org'", registry),
            ("image_build.registry = 'r.example.org/A'", registry),
            ("image_build.registry = 'r.example.org/a:tag'", registry),
            ("image_build.registry = 'r.example.org/a/../b'", registry),
            ("image_build.registry = 'https://r.example.org/a'", registry),
            ("image_build.registry = 'u:p@r.example.org/a'", registry),
            (
                "image_build.registry_user = 'u'",
                "actor.image_build.registry_user",
            ),
            (
                "image_build.buildkit = 'buildkit:1234'",
                "actor.image_build.buildkit",
            ),
            (
                "image_build.client_image = ''",
                "actor.image_build.client_image",
            ),
            ("image_build.retries = 11", "actor.image_build.retries"),
            ("image_build.timeout = '0s'", "actor.image_build.timeout"),
            (
                "image_build.max_size = '1KiB'",
                "actor.image_build.max_size",
            ),
        ] {
            match load(text) {
                Err(ConfigError::Invalid { issues }) => {
                    let keys: Vec<&str> = issues.iter().map(|issue| issue.key.as_str()).collect();
                    assert_eq!(keys, [key], "{text}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        let error = load("image_build.registries = 'x'").unwrap_err();
        assert!(error.to_string().contains("registries"), "{error}");
    }
}
