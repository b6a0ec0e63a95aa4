//! The control plane over gRPC, with or without TLS.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;
use tonic::body::Body;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use wardian::actor::substrate::messages as m;

use super::control::Control;

type HttpRequest = axum::http::Request<Body>;
type HttpResponse = axum::http::Response<Body>;

/// What connections are secured by; it can be changed.
pub(super) type Tls = Arc<Mutex<Arc<rustls::ServerConfig>>>;

pub(super) struct Server {
    pub(super) address: SocketAddr,
    /// Dropped, it ends everything.
    _runtime: Runtime,
}

impl Server {
    pub(super) fn start(control: Arc<Control>, tls: Option<Tls>) -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (control, tls) = (Arc::clone(&control), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => converse(stream, control).await,
                        Some(tls) => {
                            let config = Arc::clone(&tls.lock().unwrap());
                            if let Ok(stream) = TlsAcceptor::from(config).accept(stream).await {
                                assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
                                converse(stream, control).await;
                            }
                        }
                    }
                });
            }
        });
        Self {
            address,
            _runtime: runtime,
        }
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    control: Arc<Control>,
) {
    let service =
        hyper::service::service_fn(move |request: axum::http::Request<hyper::body::Incoming>| {
            let control = Arc::clone(&control);
            async move {
                Ok::<_, std::convert::Infallible>(answer(control, request.map(Body::new)).await)
            }
        });
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(stream), service);
    let _ = connection.await;
}

/// Answers one call.
async fn unary<Q, A>(
    request: HttpRequest,
    call: impl FnOnce(Q) -> Result<A, Status> + Clone + Send + 'static,
) -> HttpResponse
where
    Q: prost::Message + Default + Send + 'static,
    A: prost::Message + Send + 'static,
{
    let service = tower::service_fn(move |request: Request<Q>| {
        let call = call.clone();
        async move {
            let done = tokio::task::spawn_blocking(move || call(request.into_inner()));
            done.await.unwrap().map(Response::new)
        }
    });
    let mut server = tonic::server::Grpc::new(ProstCodec::<A, Q>::default());
    server.unary(service, request).await
}

/// Returns one page of a list, two objects long.
fn page<T: Clone>(all: &[T], token: &str) -> (Vec<T>, String) {
    let from: usize = token.parse().unwrap_or(0);
    let found = all.iter().skip(from).take(2).cloned().collect();
    let next = if from + 2 < all.len() {
        (from + 2).to_string()
    } else {
        String::new()
    };
    (found, next)
}

async fn answer(c: Arc<Control>, request: HttpRequest) -> HttpResponse {
    if let Some(token) = c.token() {
        let sent = request.headers().get("authorization");
        if sent.is_none_or(|sent| sent.as_bytes() != format!("Bearer {token}").as_bytes()) {
            return Status::unauthenticated("who are you?").into_http();
        }
    }
    let path = request.uri().path().to_owned();
    let resumed = |actor| m::ActorResponse { actor: Some(actor) };
    match path.strip_prefix("/ateapi.Control/").unwrap_or_default() {
        "CreateActor" => {
            unary(request, move |q: m::CreateActorRequest| {
                c.create_actor(q.actor)
            })
            .await
        }
        "GetActor" => unary(request, move |q: m::ActorRequest| c.get_actor(q.actor)).await,
        "ResumeActor" => {
            unary(request, move |q: m::ActorRequest| {
                c.resume_actor(q.actor).map(resumed)
            })
            .await
        }
        "SuspendActor" => {
            unary(request, move |q: m::ActorRequest| {
                c.suspend_actor(q.actor).map(resumed)
            })
            .await
        }
        "DeleteActor" => {
            unary(request, move |q: m::DeleteActorRequest| {
                c.delete_actor(q.actor, q.any_state)
            })
            .await
        }
        "ListActors" => {
            unary(request, move |q: m::ListRequest| {
                let (actors, next_page_token) = page(&c.list_actors(), &q.page_token);
                Ok(m::ListActorsResponse {
                    actors,
                    next_page_token,
                })
            })
            .await
        }
        "CreateActorEgressPolicy" => {
            unary(request, move |q: m::CreateEgressPolicyRequest| {
                assert_eq!(q.egress_policy.unwrap().metadata.unwrap().name, "default");
                c.create_policy(q.actor)
            })
            .await
        }
        "CreateTag" => unary(request, move |q: m::CreateTagRequest| c.create_tag(q.tag)).await,
        "GetTag" => unary(request, move |q: m::TagRequest| c.get_tag(q.tag)).await,
        "DeleteTag" => unary(request, move |q: m::TagRequest| c.delete_tag(q.tag)).await,
        "ListTags" => {
            unary(request, move |q: m::ListRequest| {
                let (tags, next_page_token) = page(&c.list_tags(), &q.page_token);
                Ok(m::ListTagsResponse {
                    tags,
                    next_page_token,
                })
            })
            .await
        }
        "CreateActorTemplate" => {
            unary(request, move |q: m::CreateActorTemplateRequest| {
                c.create_template(q.actor_template)
            })
            .await
        }
        "GetActorTemplate" => {
            unary(request, move |q: m::ActorTemplateRequest| {
                c.get_template(q.actor_template)
            })
            .await
        }
        "DeleteActorTemplate" => {
            unary(request, move |q: m::ActorTemplateRequest| {
                c.delete_template(q.actor_template)
            })
            .await
        }
        "ListActorTemplates" => {
            unary(request, move |q: m::ListRequest| {
                let (actor_templates, next_page_token) = page(&c.list_templates(), &q.page_token);
                Ok(m::ListActorTemplatesResponse {
                    actor_templates,
                    next_page_token,
                })
            })
            .await
        }
        _ => Status::unimplemented(path).into_http(),
    }
}
