//! A control plane over gRPC.
//!
//! Each call has a connection of its own: they are few, and so each has the certificate and the token of its
//! moment.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::Uri;
use axum::http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::codegen::Service;
use tonic::metadata::MetadataValue;
use tonic::transport::Endpoint;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use super::api::{
    ActorState, ActorView, ApiError, ApiErrorKind, NewActor, NewTemplate, SubstrateApi, TagView,
    TemplateView,
};
use super::messages as m;
use crate::actor::background::Background;
use crate::actor::sandboxd::BearerToken;
use crate::causes::with_causes;
use crate::http::tls::{ClientTls, TlsFiles};

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);
/// The largest message that is read.
const MAX_MESSAGE: usize = 16 << 20;
/// Objects of a page, and the most pages that are read.
const PAGE: i32 = 1000;
const MAX_PAGES: usize = 1000;
/// A scope of tags: their own atespace.
const ATESPACE: i32 = 1;
/// Snapshots with memory and processes.
const FULL: i32 = 1;
/// The sandbox class of gVisor.
const GVISOR: i32 = 1;

/// A control plane over gRPC, and one atespace of it.
#[derive(Debug)]
pub struct GrpcApi {
    endpoint: Endpoint,
    connector: Connector,
    token_file: Option<PathBuf>,
    atespace: String,
    call_timeout: Duration,
    background: Arc<Background>,
}

impl GrpcApi {
    /// Takes an address such as `https://api.ate-system.svc:443`. Its certificates and the token in
    /// `token_file` are read again as they change.
    ///
    /// # Errors
    ///
    /// Fails where the address or the certificates cannot be used; said is why.
    pub(super) fn new(
        url: &str,
        tls: &TlsFiles,
        token_file: Option<PathBuf>,
        atespace: &str,
        call_timeout: Duration,
        background: Arc<Background>,
    ) -> Result<Self, String> {
        let wrong = |reason: &str| format!("the control plane's address `{url}` {reason}");
        let uri: Uri = url.parse().map_err(|_| wrong("is no URL"))?;
        let is_secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("does not begin with `http://` or `https://`")),
        };
        let authority = uri.authority().ok_or_else(|| wrong("has no host"))?;
        if !is_secure && !tls.is_empty() {
            return Err(wrong("is without TLS, and there are certificates for it"));
        }
        let secured = is_secure.then(|| ClientTls::http2(tls.clone())).transpose();
        let secured = secured.map_err(|error| with_causes(&error))?;
        // The connector secures the connection; the library is not to look for its own way to do it.
        let endpoint = Endpoint::from_shared(format!("http://{authority}"))
            .map_err(|error| wrong(&with_causes(&error)))?
            .connect_timeout(CONNECT)
            .timeout(call_timeout)
            .origin(uri.clone());
        Ok(Self {
            endpoint,
            connector: Connector {
                host: authority.host().trim_matches(['[', ']']).to_owned(),
                port: authority
                    .port_u16()
                    .unwrap_or(if is_secure { 443 } else { 80 }),
                tls: secured.map(Arc::new),
            },
            token_file,
            atespace: atespace.to_owned(),
            call_timeout,
            background,
        })
    }

    fn reference(&self, name: &str) -> Option<m::ObjectRef> {
        Some(m::ObjectRef {
            atespace: self.atespace.clone(),
            name: name.to_owned(),
        })
    }

    fn metadata(&self, name: &str) -> Option<m::Metadata> {
        Some(m::Metadata {
            atespace: self.atespace.clone(),
            name: name.to_owned(),
        })
    }

    fn of_actor(&self, name: &str) -> m::ActorRequest {
        m::ActorRequest {
            actor: self.reference(name),
        }
    }

    /// Makes a call, whose path is `/ateapi.Control/` and its name.
    fn call<Q, A>(&self, path: &'static str, message: Q) -> Result<A, ApiError>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let call = path.rsplit_once('/').map_or(path, |(_, name)| name);
        let failed = move |kind, message| ApiError {
            call,
            kind,
            message,
        };
        let mut request = tonic::Request::new(message);
        if let Some(path) = &self.token_file {
            let token = BearerToken::from_file(path)
                .map_err(|error| failed(ApiErrorKind::Other, with_causes(&error)))?;
            let mut value = MetadataValue::try_from(format!("Bearer {}", token.text()))
                .map_err(|error| failed(ApiErrorKind::Other, error.to_string()))?;
            value.set_sensitive(true);
            request.metadata_mut().insert("authorization", value);
        }
        request.set_timeout(self.call_timeout);
        let (endpoint, connector) = (self.endpoint.clone(), self.connector.clone());
        let limit = self.call_timeout;
        let work = async move {
            let calling = async {
                let channel = endpoint
                    .connect_with_connector(connector)
                    .await
                    .map_err(|error| failed(ApiErrorKind::Unavailable, with_causes(&error)))?;
                let mut client = Grpc::new(channel).max_decoding_message_size(MAX_MESSAGE);
                client
                    .ready()
                    .await
                    .map_err(|error| failed(ApiErrorKind::Unavailable, with_causes(&error)))?;
                let codec = ProstCodec::<Q, A>::default();
                let path = PathAndQuery::from_static(path);
                let answer = client.unary(request, path, codec).await;
                answer
                    .map(tonic::Response::into_inner)
                    .map_err(|status| failed(kind_of(&status), said(&status)))
            };
            match timeout(limit, calling).await {
                Ok(answer) => answer,
                Err(_) => Err(failed(
                    ApiErrorKind::Unavailable,
                    format!("no answer within {limit:?}"),
                )),
            }
        };
        let done = self.background.run(call, limit, work);
        done.map_err(|error| failed(ApiErrorKind::Unavailable, error.to_string()))?
    }

    /// Reads all pages of a list.
    fn pages<A, T>(
        &self,
        path: &'static str,
        open: impl Fn(A) -> (Vec<T>, String),
    ) -> Result<Vec<T>, ApiError>
    where
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let mut all = Vec::new();
        let mut page_token = String::new();
        for _ in 0..MAX_PAGES {
            let request = m::ListRequest {
                atespace: self.atespace.clone(),
                page_size: PAGE,
                page_token,
            };
            let (found, next) = open(self.call(path, request)?);
            all.extend(found);
            if next.is_empty() {
                return Ok(all);
            }
            page_token = next;
        }
        Err(ApiError {
            call: path,
            kind: ApiErrorKind::Other,
            message: format!("the list has more than {MAX_PAGES} pages"),
        })
    }
}

fn kind_of(status: &Status) -> ApiErrorKind {
    match status.code() {
        Code::NotFound => ApiErrorKind::NotFound,
        Code::AlreadyExists => ApiErrorKind::Exists,
        Code::FailedPrecondition => ApiErrorKind::Precondition,
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::ResourceExhausted
        | Code::Cancelled => ApiErrorKind::Unavailable,
        Code::PermissionDenied | Code::Unauthenticated => ApiErrorKind::Denied,
        Code::Unimplemented => ApiErrorKind::Unimplemented,
        _ => ApiErrorKind::Other,
    }
}

fn said(status: &Status) -> String {
    let message: String = status.message().chars().take(500).collect();
    format!("{:?}: {message}", status.code())
}

fn actor_view(actor: &m::Actor) -> ActorView {
    let status = actor.status.as_ref();
    ActorView {
        name: name_of(actor.metadata.as_ref()),
        state: ActorState::from_number(status.map_or(0, |status| status.state)),
        crash: status
            .and_then(|status| status.crash.as_ref())
            .map(|crash| crash.message.clone()),
    }
}

fn tag_view(tag: &m::Tag) -> TagView {
    let status = tag.status.as_ref();
    TagView {
        name: name_of(tag.metadata.as_ref()),
        is_usable: status.is_some_and(|status| status.snapshot.is_some()),
    }
}

fn template_view(template: &m::ActorTemplate) -> TemplateView {
    let golden = template
        .status
        .as_ref()
        .and_then(|status| status.golden_snapshot_status.as_ref());
    TemplateView {
        name: name_of(template.metadata.as_ref()),
        is_ready: golden.is_some_and(|golden| golden.golden_tag.is_some()),
        error: golden
            .map(|golden| golden.error_message.clone())
            .filter(|message| !message.is_empty()),
    }
}

fn name_of(metadata: Option<&m::Metadata>) -> String {
    metadata.map_or_else(String::new, |metadata| metadata.name.clone())
}

impl SubstrateApi for GrpcApi {
    fn create_actor(&self, actor: &NewActor) -> Result<(), ApiError> {
        let actor = m::Actor {
            metadata: self.metadata(&actor.name),
            actor_template: self.reference(&actor.template),
            source_tag: actor
                .source_tag
                .as_deref()
                .and_then(|tag| self.reference(tag)),
            status: None,
        };
        let request = m::CreateActorRequest { actor: Some(actor) };
        let _: m::Actor = self.call("/ateapi.Control/CreateActor", request)?;
        Ok(())
    }

    fn actor(&self, name: &str) -> Result<ActorView, ApiError> {
        let actor: m::Actor = self.call("/ateapi.Control/GetActor", self.of_actor(name))?;
        Ok(actor_view(&actor))
    }

    fn actors(&self) -> Result<Vec<ActorView>, ApiError> {
        self.pages(
            "/ateapi.Control/ListActors",
            |page: m::ListActorsResponse| {
                let actors = page.actors.iter().map(actor_view).collect();
                (actors, page.next_page_token)
            },
        )
    }

    fn resume_actor(&self, name: &str) -> Result<(), ApiError> {
        let request = self.of_actor(name);
        let _: m::ActorResponse = self.call("/ateapi.Control/ResumeActor", request)?;
        Ok(())
    }

    fn suspend_actor(&self, name: &str) -> Result<(), ApiError> {
        let request = self.of_actor(name);
        let _: m::ActorResponse = self.call("/ateapi.Control/SuspendActor", request)?;
        Ok(())
    }

    fn delete_actor(&self, name: &str) -> Result<(), ApiError> {
        let request = m::DeleteActorRequest {
            actor: self.reference(name),
            any_state: true,
        };
        let _: m::Actor = self.call("/ateapi.Control/DeleteActor", request)?;
        Ok(())
    }

    fn deny_egress(&self, name: &str) -> Result<(), ApiError> {
        let request = m::CreateEgressPolicyRequest {
            actor: self.reference(name),
            egress_policy: Some(m::EgressPolicy {
                metadata: self.metadata("default"),
            }),
        };
        let _: m::EgressPolicy = self.call("/ateapi.Control/CreateActorEgressPolicy", request)?;
        Ok(())
    }

    fn create_tag(&self, name: &str, actor: &str) -> Result<(), ApiError> {
        let tag = m::Tag {
            metadata: self.metadata(name),
            status: None,
            scope: ATESPACE,
            source_actor: self.reference(actor),
        };
        let request = m::CreateTagRequest { tag: Some(tag) };
        let _: m::Tag = self.call("/ateapi.Control/CreateTag", request)?;
        Ok(())
    }

    fn tags(&self) -> Result<Vec<TagView>, ApiError> {
        self.pages("/ateapi.Control/ListTags", |page: m::ListTagsResponse| {
            let tags = page.tags.iter().map(tag_view).collect();
            (tags, page.next_page_token)
        })
    }

    fn tag(&self, name: &str) -> Result<TagView, ApiError> {
        let request = m::TagRequest {
            tag: self.reference(name),
        };
        let tag: m::Tag = self.call("/ateapi.Control/GetTag", request)?;
        Ok(tag_view(&tag))
    }

    fn delete_tag(&self, name: &str) -> Result<(), ApiError> {
        let request = m::TagRequest {
            tag: self.reference(name),
        };
        let _: m::Tag = self.call("/ateapi.Control/DeleteTag", request)?;
        Ok(())
    }

    fn create_template(&self, template: &NewTemplate) -> Result<(), ApiError> {
        let request = m::CreateActorTemplateRequest {
            actor_template: Some(self.template_message(template)),
        };
        let _: m::ActorTemplate = self.call("/ateapi.Control/CreateActorTemplate", request)?;
        Ok(())
    }

    fn templates(&self) -> Result<Vec<TemplateView>, ApiError> {
        self.pages(
            "/ateapi.Control/ListActorTemplates",
            |page: m::ListActorTemplatesResponse| {
                let templates = page.actor_templates.iter().map(template_view).collect();
                (templates, page.next_page_token)
            },
        )
    }

    fn template(&self, name: &str) -> Result<TemplateView, ApiError> {
        let request = m::ActorTemplateRequest {
            actor_template: self.reference(name),
        };
        let template: m::ActorTemplate = self.call("/ateapi.Control/GetActorTemplate", request)?;
        Ok(template_view(&template))
    }

    fn delete_template(&self, name: &str) -> Result<(), ApiError> {
        let request = m::ActorTemplateRequest {
            actor_template: self.reference(name),
        };
        let _: m::ActorTemplate = self.call("/ateapi.Control/DeleteActorTemplate", request)?;
        Ok(())
    }

    fn logs(&self, _: &str) -> Result<String, ApiError> {
        Err(ApiError {
            call: "logs",
            kind: ApiErrorKind::Unimplemented,
            message: "the control plane has no call for them".to_owned(),
        })
    }
}

impl GrpcApi {
    fn template_message(&self, template: &NewTemplate) -> m::ActorTemplate {
        let limit = |name: &str, quantity: String| m::Limit {
            name: name.to_owned(),
            quantity,
        };
        let mut limits = vec![limit("memory", template.memory.to_string())];
        limits.extend(template.cpu.clone().map(|cpu| limit("cpu", cpu)));
        const VOLUME: &str = "wardian";
        let volume = template.volume.as_ref();
        let container = m::Container {
            name: "sandboxd".to_owned(),
            image: template.image.clone(),
            command: template.command.clone(),
            env: template
                .env
                .iter()
                .map(|(name, value)| m::Variable {
                    name: name.clone(),
                    value: value.clone(),
                })
                .collect(),
            wakeup_probe: Some(m::WakeupProbe {
                http_get: Some(m::HttpGet {
                    path: "/readyz".to_owned(),
                    port: i32::from(template.port),
                }),
                timeout_seconds: 60,
            }),
            volume_mounts: volume
                .map(|(_, folder)| m::VolumeMount {
                    name: VOLUME.to_owned(),
                    mount_path: folder.clone(),
                })
                .into_iter()
                .collect(),
        };
        m::ActorTemplate {
            metadata: self.metadata(&template.name),
            worker_selector: (!template.worker_labels.is_empty()).then(|| m::Selector {
                match_labels: template.worker_labels.clone().into_iter().collect(),
            }),
            containers: vec![container],
            volumes: volume
                .map(|(reference, _)| m::Volume {
                    name: VOLUME.to_owned(),
                    image: Some(m::ImageVolume {
                        reference: reference.clone(),
                    }),
                })
                .into_iter()
                .collect(),
            snapshot_config: Some(m::SnapshotConfig {
                on_commit: FULL,
                storage_location: template.storage_location.clone(),
            }),
            sandbox_config: Some(m::SandboxConfig {
                sandbox_class: GVISOR,
                config_name: template.sandbox_config.clone(),
            }),
            resources: Some(m::Resources { limits }),
            status: None,
        }
    }
}

/// Bytes in both directions.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Makes connections.
#[derive(Debug, Clone)]
struct Connector {
    host: String,
    port: u16,
    tls: Option<Arc<ClientTls>>,
}

type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, std::io::Error>> + Send>>;

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = std::io::Error;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { host, port, tls } = self.clone();
        Box::pin(async move {
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let stream: Box<dyn Stream> = match tls {
                None => Box::new(stream),
                Some(tls) => {
                    let secured = tls.connect(&host, stream).await;
                    Box::new(secured.map_err(std::io::Error::other)?)
                }
            };
            Ok(TokioIo::new(stream))
        })
    }
}
