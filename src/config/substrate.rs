//! Actors of an Agent Substrate: what the backend `substrate` is told.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::actor::require_time;
use super::validate::Issues;
use super::{TlsConfig, units};
use crate::address::shown;

/// An Agent Substrate (docs/heavy-tier.md).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SubstrateConfig {
    /// The control plane's address, `https://HOST:PORT`, or `http://HOST:PORT` where something before it does
    /// TLS; the command `kubectl ate` unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<String>,
    /// A file with the token that the control plane asks for, read for each call; none unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_token_file: Option<PathBuf>,
    /// Arguments after `kubectl ate`, such as `--context` and its value; none unless given.
    pub kubectl_arguments: Vec<String>,
    /// Whom the control plane and the router must be, and the certificate that is shown to them; read again as
    /// the files change.
    pub tls: TlsConfig,
    /// The atespace of the actors, which must be there; has to be given.
    pub atespace: String,
    /// The router's address, such as `https://atenet-router.ate-system.svc`, or `http://127.0.0.1:8080` where
    /// something before it does TLS; has to be given.
    pub router: String,
    /// A file with the token of `wardian sandboxd` inside actors; has to be given.
    pub token_file: PathBuf,
    /// Templates that are there already, by their images; their first program is `wardian sandboxd` at port 80.
    pub templates: BTreeMap<String, String>,
    /// How templates are made of other images; those are refused unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_templates: Option<TemplateConfig>,
    /// User and group of commands, where a task does not say whose they are; 65532 unless given. The working folder
    /// is theirs. With 0 they have root's rights inside, and can end the server there, which counts as theirs to have
    /// done.
    pub user: u32,
    /// Start actors where the control plane has no egress policies, too: what they reach is then up to the
    /// cluster's network. Refused unless given.
    pub allow_missing_egress_policies: bool,
    /// Who this is, if nobody else works under that name in the atespace at the same time: what an earlier run
    /// left is then deleted at once, and otherwise when its time is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// How long a call of the control plane may take; 1m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub call_timeout: Duration,
    /// How long an actor may take to be started, waiting for a free worker included; 2m unless given.
    #[serde(with = "units::duration")]
    #[schemars(with = "units::DurationText")]
    pub ready_timeout: Duration,
}

impl Default for SubstrateConfig {
    fn default() -> Self {
        Self {
            control: None,
            control_token_file: None,
            kubectl_arguments: Vec::new(),
            tls: TlsConfig::default(),
            atespace: String::new(),
            router: String::new(),
            token_file: PathBuf::new(),
            templates: BTreeMap::new(),
            new_templates: None,
            user: 65532,
            allow_missing_egress_policies: false,
            owner: None,
            call_timeout: Duration::from_mins(1),
            ready_timeout: Duration::from_mins(2),
        }
    }
}

/// How templates are made of images.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TemplateConfig {
    /// Where snapshots are kept, such as `gs://BUCKET/FOLDER`; has to be given.
    pub storage_location: String,
    /// The cluster's `SandboxConfig` that says how gVisor is run; has to be given.
    pub sandbox_config: String,
    /// An image, by digest, that has this program and is shown in actors at `/opt/wardian`; their own images
    /// have it unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandboxd_image: Option<String>,
    /// CPUs of an actor, as Kubernetes writes them, such as `500m`; no limit unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Labels that the workers of actors must have; none unless given.
    pub worker_labels: BTreeMap<String, String>,
}

/// Checks what a run says of its Substrate.
pub(super) fn validate(substrate: &SubstrateConfig, issues: &mut Issues) {
    let key = |key: &str| format!("actor.substrate.{key}");
    let has_scheme = |url: &str| url.starts_with("http://") || url.starts_with("https://");
    issues.require(
        substrate.control.as_deref().is_none_or(has_scheme),
        key("control"),
        substrate.control.as_deref().map(shown).unwrap_or_default(),
        "begin it with `https://` or `http://`",
    );
    issues.require(
        has_scheme(&substrate.router),
        key("router"),
        shown(&substrate.router),
        "give the router's address, which begins with `https://` or `http://`",
    );
    issues.require(
        !substrate.atespace.is_empty(),
        key("atespace"),
        &substrate.atespace,
        "name the atespace of the actors",
    );
    issues.require(
        !substrate.token_file.as_os_str().is_empty(),
        key("token_file"),
        substrate.token_file.display(),
        "give a file with the token of `wardian sandboxd`",
    );
    issues.require(
        substrate.control.is_none() || substrate.kubectl_arguments.is_empty(),
        key("kubectl_arguments"),
        substrate.kubectl_arguments.join(" "),
        "leave it out, or `control`: with it `kubectl` is not run",
    );
    issues.require(
        substrate.control.is_some() || substrate.control_token_file.is_none(),
        key("control_token_file"),
        (substrate.control_token_file.as_deref())
            .map_or_else(String::new, |path| path.display().to_string()),
        "leave it out, or give `control`: `kubectl` has credentials of its own",
    );
    if let Some(templates) = &substrate.new_templates {
        for (name, value) in [
            ("storage_location", &templates.storage_location),
            ("sandbox_config", &templates.sandbox_config),
        ] {
            issues.require(
                !value.is_empty(),
                key(&format!("new_templates.{name}")),
                value,
                "say where the Substrate keeps snapshots, and which of its configurations runs gVisor",
            );
        }
    }
    for (name, time) in [
        ("call_timeout", substrate.call_timeout),
        ("ready_timeout", substrate.ready_timeout),
    ] {
        require_time(issues, key(name), time);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{ConfigError, RunConfig};

    const GOOD: &str = "atespace = 'a'\nrouter = 'http://127.0.0.1:8080'\ntoken_file = 't'\n";

    fn load(text: &str) -> Result<RunConfig, ConfigError> {
        let text =
            format!("model.path = 'm'\ntask.path = 't'\n[actor]\nbackend = 'substrate'\n{text}");
        RunConfig::from_toml::<&str>(&text, &[])
    }

    #[test]
    fn a_substrate_reads_back() {
        let config = load(&format!(
            "[actor.substrate]\n{GOOD}templates = {{ 'python@sha256:1' = 'python' }}\n\
             new_templates = {{ storage_location = 'gs://b', sandbox_config = 'gvisor' }}"
        ))
        .unwrap();
        let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(config, again);
    }

    #[test]
    fn what_is_missing_or_makes_no_sense_is_named() {
        for (text, key) in [
            (String::new(), "actor.substrate"),
            (
                "[actor.substrate]\natespace = 'a'\ntoken_file = 't'".to_owned(),
                "actor.substrate.router",
            ),
            (
                format!("[actor.substrate]\n{GOOD}control = 'host:1'"),
                "actor.substrate.control",
            ),
            (
                format!("[actor.substrate]\n{GOOD}control_token_file = 'f'"),
                "actor.substrate.control_token_file",
            ),
            (
                format!(
                    "[actor.substrate]\n{GOOD}control = 'https://c'\nkubectl_arguments = ['-v']"
                ),
                "actor.substrate.kubectl_arguments",
            ),
            (
                format!("[actor.substrate]\n{GOOD}new_templates = {{ sandbox_config = 's' }}"),
                "actor.substrate.new_templates.storage_location",
            ),
            (
                format!("[actor.substrate]\n{GOOD}ready_timeout = '0s'"),
                "actor.substrate.ready_timeout",
            ),
        ] {
            match load(&text) {
                Err(ConfigError::Invalid { issues }) => assert_eq!(issues[0].key, key, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
