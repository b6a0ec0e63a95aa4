//! Which backend runs a run's actors, and opening it.

use std::sync::Arc;
use std::time::Duration;

use crate::actor::bwrap::BwrapBackend;
use crate::actor::escalation::{Candidate, Decision, Needs, Rules, Tier, decide};
use crate::actor::image::{Buildah, BuildahOptions, ImageBuilder};
use crate::actor::runsc::{RunscBackend, RunscOptions};
use crate::actor::{ActorBackend, ActorError, Isolation};
use crate::causes::with_causes;
use crate::config::{ActorBackendName, ActorConfig, DeclaredIsolation, OpenEnvActorConfig};
use crate::http::tls::TlsFiles;
use crate::openenv::client::RemoteConfig;
use crate::openenv::client::actors::{OpenEnvBackend, OpenEnvOptions};
use crate::sandbox::CacheFolder;

/// Where root filesystems are kept in the cache folder.
const IMAGES: &str = "images";

/// A backend that is open.
#[derive(Debug)]
pub struct OpenedBackend {
    /// It.
    pub backend: Arc<dyn ActorBackend>,
    /// What has images built for its actors, if the run says so.
    pub builder: Option<Arc<dyn ImageBuilder>>,
    /// Why it was chosen.
    pub why: String,
}

/// Opens the backend that `config` names; `auto` takes the strongest that is there, and none weaker than gVisor.
/// Actors of one task are asked for `group` at a time.
///
/// # Errors
///
/// Fails where it is not there, where none that is there does, and where images are to be built and what builds them
/// is not there.
pub fn open_backend(
    config: &ActorConfig,
    needs: &Needs,
    group: usize,
) -> Result<OpenedBackend, ActorError> {
    let names: &[ActorBackendName] = match &config.backend {
        ActorBackendName::Auto => &[ActorBackendName::Runsc, ActorBackendName::Bwrap],
        name => std::slice::from_ref(name),
    };
    let mut rules = Rules::default();
    if config.backend != ActorBackendName::Auto {
        // Named, whatever it is: that is how weaker isolation is asked for.
        rules.weakest = Isolation::Namespaces;
    }
    let opened: Vec<_> = (names.iter())
        .map(|name| (name.as_str(), open(*name, config, group)))
        .collect();
    let candidates: Vec<Candidate> = (opened.iter())
        .map(|(name, backend)| Candidate {
            name,
            state: match backend {
                Ok((backend, _)) => Ok(backend.capabilities()),
                Err(error) => Err(with_causes(error)),
            },
        })
        .collect();
    let Decision { tier, why } = decide(needs, &candidates, &rules)?;
    let chosen = opened.into_iter().find_map(|(name, backend)| {
        let backend = backend.ok()?;
        (tier == Tier::Actor(name)).then_some(backend)
    });
    // What needs a shell is never sent to WebAssembly.
    let (backend, mut builder) = chosen.ok_or_else(|| ActorError::InvalidSpec {
        reason: format!("{tier:?} was chosen for what needs a shell"),
    })?;
    if backend.capabilities().root_folder {
        builder = open_buildah(config)?;
    }
    Ok(OpenedBackend {
        backend,
        builder,
        why,
    })
}

/// Opens what builds images on this machine, if the run says so.
fn open_buildah(config: &ActorConfig) -> Result<Option<Arc<dyn ImageBuilder>>, ActorError> {
    let Some(builds) = &config.image_build else {
        return Ok(None);
    };
    let cache = || Some(CacheFolder::User.path()?.join(IMAGES));
    let folder = (builds.folder.clone())
        .or_else(cache)
        .ok_or_else(|| ActorError::InvalidSpec {
            reason: "there is no folder to keep images in; set `WARDIAN_CACHE` or `HOME`, or give \
                     `actor.image_build.folder`"
                .to_owned(),
        })?;
    let buildah = Buildah::open(BuildahOptions {
        folder,
        network: builds.network,
        timeout: builds.timeout,
        max_size: builds.max_size.as_u64(),
    })?;
    Ok(Some(Arc::new(buildah)))
}

/// What a cluster has and allows of what a run's actors need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterReview {
    /// Whose controllers would make the actors.
    pub controller: &'static str,
    /// The namespace that was asked about.
    pub namespace: String,
    /// Kinds that the cluster does not have, each with its group and version.
    pub missing: Vec<String>,
    /// Verbs with resources that are not allowed, such as `create pods/exec`.
    pub denied: Vec<String>,
    /// How many are.
    pub allowed: usize,
}

/// Asks the cluster of `config` what it has and allows, for the backend that it names, or `kruise` where it
/// names none of a cluster; nothing is made.
///
/// # Errors
///
/// Fails where there is no cluster, where it does not answer within `limit`, and where this program is built
/// without clusters.
pub fn review_cluster(config: &ActorConfig, limit: Duration) -> Result<ClusterReview, ActorError> {
    let name = match config.backend {
        ActorBackendName::AgentSandbox => ActorBackendName::AgentSandbox,
        _ => ActorBackendName::Kruise,
    };
    cluster::review(name, config, limit)
}

/// A backend, and what builds images for it if that is part of it.
type Opened = (Arc<dyn ActorBackend>, Option<Arc<dyn ImageBuilder>>);

/// Opens a backend. One more is opened here, and named in the configuration.
fn open(name: ActorBackendName, config: &ActorConfig, group: usize) -> Result<Opened, ActorError> {
    let backend: Arc<dyn ActorBackend> = match name {
        ActorBackendName::Auto | ActorBackendName::Runsc => {
            Arc::new(RunscBackend::open(&RunscOptions::default())?)
        }
        ActorBackendName::Bwrap => Arc::new(BwrapBackend::open(None)?),
        ActorBackendName::Kruise | ActorBackendName::AgentSandbox => {
            return cluster::open_kubernetes(name, config, group);
        }
        ActorBackendName::Substrate => cluster::open_substrate(config.substrate.as_ref())?,
        ActorBackendName::Openenv => Arc::new(open_openenv(config.openenv.as_ref())?),
    };
    Ok((backend, None))
}

/// Looks whether the first server of the backend `openenv` answers.
///
/// # Errors
///
/// Fails where it does not, and where the configuration makes no sense.
pub fn open_openenv(config: Option<&OpenEnvActorConfig>) -> Result<OpenEnvBackend, ActorError> {
    let config = config.ok_or_else(|| ActorError::Unusable {
        backend: ActorBackendName::Openenv.as_str(),
        reason: "needs `actor.openenv`".to_owned(),
    })?;
    let bytes = |size: bytesize::ByteSize| usize::try_from(size.as_u64()).unwrap_or(usize::MAX);
    let server = RemoteConfig {
        headers: config.headers.clone(),
        tls: match &config.tls {
            None => TlsFiles::default(),
            Some(tls) => TlsFiles {
                certificate: tls.certificate.clone(),
                key: tls.key.clone(),
                ca: tls.ca.clone(),
            },
        },
        connect_timeout: config.connect_timeout,
        reset_timeout: config.reset_timeout,
        step_timeout: config.step_timeout,
        retry_timeout: config.retry_timeout,
        max_message_bytes: bytes(config.max_message_size),
        ..RemoteConfig::new(&config.url)
    };
    OpenEnvBackend::open(OpenEnvOptions {
        tool: config.tool.clone(),
        argument: config.argument.clone(),
        timeout_argument: config.timeout_argument.clone(),
        arguments: config.arguments.clone().into_iter().collect(),
        output: config.output.clone(),
        max_output: bytes(config.max_output),
        reset: config.reset.clone().into_iter().collect(),
        image_argument: config.image_argument.clone(),
        isolation: match config.isolation {
            DeclaredIsolation::Namespaces => Isolation::Namespaces,
            DeclaredIsolation::Gvisor => Isolation::UserKernel,
        },
        ..OpenEnvOptions::new(server)
    })
}

/// Clusters, in a program that is built for them.
#[cfg(feature = "k8s")]
mod cluster {
    use std::io::Read as _;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use super::{ClusterReview, Opened};
    use crate::actor::image::RegistryOptions;
    use crate::actor::kubernetes::{
        AccessReview, ApiServer, BuildOptions, Controller, KubernetesBackend, KubernetesOptions,
        Owner, Toleration, review_access,
    };
    use crate::actor::sandboxd::BearerToken;
    use crate::actor::substrate::{
        ControlPlane, SubstrateBackend, SubstrateOptions, TemplateOptions,
    };
    use crate::actor::{ActorBackend, ActorError, User};
    use crate::causes::with_causes;
    use crate::config::{
        ActorBackendName, ActorConfig, ImageBuildConfig, KubernetesConfig, SubstrateConfig,
    };
    use crate::http::tls::TlsFiles;
    use crate::http::uuid4;

    pub(super) fn open_kubernetes(
        name: ActorBackendName,
        config: &ActorConfig,
        group: usize,
    ) -> Result<Opened, ActorError> {
        let mut options = kubernetes_options(name, &config.kubernetes, group);
        options.builds = config.image_build.as_ref().map(build_options).transpose()?;
        let backend = KubernetesBackend::open(options)?;
        let builder = backend.builder();
        Ok((Arc::new(backend), builder))
    }

    pub(super) fn review(
        name: ActorBackendName,
        config: &ActorConfig,
        limit: Duration,
    ) -> Result<ClusterReview, ActorError> {
        let mut options = kubernetes_options(name, &config.kubernetes, 1);
        options.builds = config.image_build.as_ref().map(build_options).transpose()?;
        options.request_timeout = options.request_timeout.min(limit);
        let AccessReview {
            namespace,
            missing,
            denied,
            allowed,
        } = review_access(&options, limit)?;
        Ok(ClusterReview {
            controller: options.controller.name(),
            namespace,
            missing,
            denied,
            allowed,
        })
    }

    fn kubernetes_options(
        name: ActorBackendName,
        config: &KubernetesConfig,
        group: usize,
    ) -> KubernetesOptions {
        let mut controller = match name {
            ActorBackendName::AgentSandbox => Controller::agent_sandbox(),
            _ => Controller::kruise(),
        };
        let asked = |own: &mut String, other: &Option<String>| {
            if let Some(other) = other {
                own.clone_from(other);
            }
        };
        match &mut controller {
            Controller::Kruise { group_version } => asked(group_version, &config.kruise_group),
            Controller::AgentSandbox { core, extensions } => {
                asked(core, &config.agent_sandbox_group);
                asked(extensions, &config.agent_sandbox_extensions);
            }
        }
        let mut options = KubernetesOptions::new(controller, format!("run-{}", uuid4()));
        options.api_server = match (&config.api_server, &config.kubeconfig) {
            (Some(url), _) => ApiServer::Url(url.clone()),
            (None, Some(path)) => ApiServer::Kubeconfig {
                path: path.clone(),
                context: config.context.clone(),
            },
            (None, None) => ApiServer::Infer,
        };
        options.namespace.clone_from(&config.namespace);
        options.warm = (config.warm).unwrap_or_else(|| u32::try_from(group).unwrap_or(u32::MAX));
        options.pools = config.pools;
        options.runtime_class =
            Some(config.runtime_class.clone()).filter(|class| !class.is_empty());
        options.user = User {
            uid: config.user,
            gid: config.user,
        };
        options
            .image_pull_secrets
            .clone_from(&config.image_pull_secrets);
        options.node_selector.clone_from(&config.node_selector);
        options.tolerations = (config.tolerations.iter())
            .map(|toleration| Toleration {
                key: toleration.key.clone(),
                value: toleration.value.clone(),
                effect: toleration.effect.clone(),
            })
            .collect();
        options.owner = own_pod(config);
        options.request_timeout = config.request_timeout;
        options.ready_timeout = config.ready_timeout;
        options
    }

    /// The largest password that is read.
    const MAX_PASSWORD: u64 = 4 << 10;

    /// Returns how images are built, with the password that its registry is asked with.
    fn build_options(config: &ImageBuildConfig) -> Result<BuildOptions, ActorError> {
        let password = |path: &Path| -> Result<String, ActorError> {
            let mut text = String::new();
            let read = fs_err::File::open(path)
                .and_then(|file| file.take(MAX_PASSWORD).read_to_string(&mut text));
            read.map_err(|error| ActorError::InvalidSpec {
                reason: format!("`actor.image_build.registry_password_file`: {error}"),
            })?;
            Ok(text.trim_end_matches(['\r', '\n']).to_owned())
        };
        let credentials = match (&config.registry_user, &config.registry_password_file) {
            (Some(user), Some(path)) => Some((user.clone(), password(path)?)),
            _ => None,
        };
        let registry = config.registry.clone().unwrap_or_default();
        Ok(BuildOptions {
            buildkit: config.buildkit.clone(),
            push_secret: config.push_secret.clone(),
            registry: RegistryOptions {
                plain_http: config.plain_http,
                credentials,
                ..RegistryOptions::default()
            },
            timeout: config.timeout,
            retries: config.retries,
            ..BuildOptions::new(registry, config.client_image.clone())
        })
    }

    pub(super) fn open_substrate(
        config: Option<&SubstrateConfig>,
    ) -> Result<Arc<dyn ActorBackend>, ActorError> {
        let unusable = |reason: String| ActorError::Unusable {
            backend: ActorBackendName::Substrate.as_str(),
            reason,
        };
        let config = config.ok_or_else(|| unusable("needs `actor.substrate`".to_owned()))?;
        let tls = TlsFiles {
            certificate: config.tls.certificate.clone(),
            key: config.tls.key.clone(),
            ca: config.tls.ca.clone(),
        };
        let token = BearerToken::from_file(&config.token_file).map_err(|error| {
            unusable(format!(
                "needs `actor.substrate.token_file`: {}",
                with_causes(&error)
            ))
        })?;
        let control = match &config.control {
            Some(url) => ControlPlane::Grpc {
                url: url.clone(),
                tls: tls.clone(),
                token_file: config.control_token_file.clone(),
            },
            None => ControlPlane::Kubectl {
                program: "kubectl".into(),
                arguments: config.kubectl_arguments.clone(),
            },
        };
        let mut options = SubstrateOptions::new(control, &config.atespace, &config.router, token);
        options.router_tls = tls;
        options.templates.clone_from(&config.templates);
        options.new_templates = config.new_templates.as_ref().map(|templates| {
            let mut made =
                TemplateOptions::new(&templates.storage_location, &templates.sandbox_config);
            made.sandboxd_image.clone_from(&templates.sandboxd_image);
            made.cpu.clone_from(&templates.cpu);
            made.worker_labels.clone_from(&templates.worker_labels);
            made
        });
        options.user = User {
            uid: config.user,
            gid: config.user,
        };
        options.allow_missing_egress_policies = config.allow_missing_egress_policies;
        options.owner.clone_from(&config.owner);
        options.call_timeout = config.call_timeout;
        options.ready_timeout = config.ready_timeout;
        Ok(Arc::new(SubstrateBackend::open(options)?))
    }

    /// Where a pod is told its namespace.
    const OWN_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

    /// Returns the pod that this runs in, where it is told of it and it is in the cluster and the namespace of the
    /// actors: what it made ends with it. An owner elsewhere counts as gone, and all would be deleted at once.
    fn own_pod(config: &KubernetesConfig) -> Option<Owner> {
        let is_elsewhere = config.api_server.is_some()
            || config.kubeconfig.is_some()
            || std::env::var_os("KUBECONFIG").is_some();
        let own = fs_err::read_to_string(OWN_NAMESPACE).ok()?;
        let is_other = |namespace: &String| namespace != own.trim();
        if is_elsewhere || config.namespace.as_ref().is_some_and(is_other) {
            return None;
        }
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Some(Owner {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: variable("WARDIAN_POD_NAME")?,
            uid: variable("WARDIAN_POD_UID")?,
        })
    }
}

/// Clusters, in a program that is not built for them.
#[cfg(not(feature = "k8s"))]
mod cluster {
    use std::sync::Arc;
    use std::time::Duration;

    use super::{ClusterReview, Opened};
    use crate::actor::{ActorBackend, ActorError};
    use crate::config::{ActorBackendName, ActorConfig, SubstrateConfig};

    pub(super) fn review(
        name: ActorBackendName,
        _config: &ActorConfig,
        _limit: Duration,
    ) -> Result<ClusterReview, ActorError> {
        Err(missing(name))
    }

    pub(super) fn open_kubernetes(
        name: ActorBackendName,
        _config: &ActorConfig,
        _group: usize,
    ) -> Result<Opened, ActorError> {
        Err(missing(name))
    }

    pub(super) fn open_substrate(
        _config: Option<&SubstrateConfig>,
    ) -> Result<Arc<dyn ActorBackend>, ActorError> {
        Err(missing(ActorBackendName::Substrate))
    }

    fn missing(name: ActorBackendName) -> ActorError {
        ActorError::Unusable {
            backend: name.as_str(),
            reason: "is not in this program: build it with `--features k8s`".to_owned(),
        }
    }
}
