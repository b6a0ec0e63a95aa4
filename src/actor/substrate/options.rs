//! How a cluster is reached, and what is asked of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::actor::User;
use crate::actor::sandboxd::BearerToken;
use crate::http::tls::TlsFiles;

/// How the control plane is reached.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ControlPlane {
    /// Over gRPC.
    Grpc {
        /// Its address: `https://HOST:PORT`, or `http://HOST:PORT` where something before it does TLS.
        url: String,
        /// Whom it must be, and the certificate that is shown to it. Read again as the files change.
        tls: TlsFiles,
        /// A token to send, such as that of a service account. Read for each call.
        token_file: Option<PathBuf>,
    },
    /// By the command `kubectl ate`.
    Kubectl {
        /// The program.
        program: PathBuf,
        /// Arguments after `ate`, such as `--context` and its value.
        arguments: Vec<String>,
    },
}

/// How templates are made of images.
#[derive(Debug, Clone)]
pub struct TemplateOptions {
    /// Where snapshots are kept, such as `gs://BUCKET/FOLDER`.
    pub storage_location: String,
    /// The cluster's `SandboxConfig` that says how gVisor is run.
    pub sandbox_config: String,
    /// An image, by digest, that has this program and is shown in actors at `/opt/wardian`; none where their
    /// own images have it.
    pub sandboxd_image: Option<String>,
    /// Where this program is in an actor. Default: `/opt/wardian/wardian`.
    pub program: String,
    /// CPUs of an actor, as Kubernetes writes them, such as `500m`. Default: no limit.
    pub cpu: Option<String>,
    /// Labels that the workers of actors must have. Default: none.
    pub worker_labels: BTreeMap<String, String>,
    /// How long the first snapshot of a template may take. Default: 5 minutes.
    pub ready_timeout: Duration,
}

impl TemplateOptions {
    /// Returns options with the defaults, and without an image for this program.
    #[must_use]
    pub fn new(storage_location: impl Into<String>, sandbox_config: impl Into<String>) -> Self {
        Self {
            storage_location: storage_location.into(),
            sandbox_config: sandbox_config.into(),
            sandboxd_image: None,
            program: "/opt/wardian/wardian".to_owned(),
            cpu: None,
            worker_labels: BTreeMap::new(),
            ready_timeout: Duration::from_secs(300),
        }
    }
}

/// How a cluster is reached, and what is asked of it.
#[derive(Debug, Clone)]
pub struct SubstrateOptions {
    /// The control plane.
    pub control: ControlPlane,
    /// The atespace that actors are in. It must be there.
    pub atespace: String,
    /// The address of the router: `https://atenet-router.ate-system.svc`, or `http://127.0.0.1:8080` where
    /// something before it does TLS.
    pub router: String,
    /// Whom the router must be, and the certificate that is shown to it. Read again as the files change.
    pub router_tls: TlsFiles,
    /// The token of the servers inside actors. Templates that are there already must have been made with it.
    pub token: BearerToken,
    /// Templates that are there already, by the images that specs name. `wardian sandboxd` must be the first
    /// program of their actors, at port 80.
    pub templates: BTreeMap<String, String>,
    /// How templates are made of other images; none refuses them.
    pub new_templates: Option<TemplateOptions>,
    /// Who commands are that do not say it, where their actor's spec asks for root, as it does unless it says
    /// otherwise. The working folder and those that must be writable are theirs. Default: user and group 65532, who
    /// cannot end the server inside.
    pub user: User,
    /// Whether actors are started where the control plane has no egress policies: then what they reach is up to
    /// the cluster's network. Default: no.
    pub allow_missing_egress_policies: bool,
    /// Who this is, such as the name of a job, if nobody else works under that name in the atespace at the same
    /// time: what an earlier run of it left is then deleted at once. Default: nobody; what others left is
    /// deleted when its time is over.
    pub owner: Option<String>,
    /// How long a call of the control plane may take. Default: 60 s.
    pub call_timeout: Duration,
    /// How long an actor may take to be started, waiting for a free worker included. Default: 2 minutes.
    pub ready_timeout: Duration,
    /// How long a request to an actor that gets no answer is tried again. Default: 30 s.
    pub patience: Duration,
}

impl SubstrateOptions {
    /// Returns options with the defaults, without templates.
    #[must_use]
    pub fn new(
        control: ControlPlane,
        atespace: impl Into<String>,
        router: impl Into<String>,
        token: BearerToken,
    ) -> Self {
        Self {
            control,
            atespace: atespace.into(),
            router: router.into(),
            router_tls: TlsFiles::default(),
            token,
            templates: BTreeMap::new(),
            new_templates: None,
            user: User {
                uid: 65532,
                gid: 65532,
            },
            allow_missing_egress_policies: false,
            owner: None,
            call_timeout: Duration::from_secs(60),
            ready_timeout: Duration::from_secs(120),
            patience: Duration::from_secs(30),
        }
    }
}
