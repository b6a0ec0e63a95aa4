//! `wardian proxy`: agents of third parties in front of a model, captured as tokens.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use bytesize::ByteSize;
use clap::Args;

use super::serving::{EngineArgs, NetworkArgs, Served, api_key, on_runtime, secret};
use super::setup;
use crate::address::shown;
use crate::cli::ExitStatus;
use crate::cli::args::{ModelArgs, parse_duration, require_http, require_tls_for};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::http;
use crate::http::tls::TlsFiles;
use crate::proxy::{self, Backend, ProxyConfig, Purpose, Upstream, UpstreamConfig};

/// What sessions are for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum PurposeName {
    /// Sample as the agent asks; what a trainer could not score again is context
    #[default]
    Auto,
    /// Sample from the model's own distribution, whatever the agent asks
    Train,
    /// Learn from nothing
    Eval,
}

/// Arguments of `wardian proxy`.
#[derive(Debug, Args)]
pub(in crate::cli) struct ProxyArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Server with the OpenAI API that answers instead of a model of our own, such as
    /// `http://127.0.0.1:8000/v1`
    #[arg(long, value_name = "URL", conflicts_with_all = ["model", "overrides"])]
    upstream: Option<String>,
    #[command(flatten)]
    of_upstream: UpstreamArgs,
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8001")]
    listen: SocketAddr,
    /// Name that the model has in the list of models [default: as given with `--model`, or `starter`]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Environment variable that holds the key of the control routes [default: no key is asked]
    #[arg(long, value_name = "NAME")]
    admin_key_env: Option<String>,
    #[command(flatten)]
    network: NetworkArgs,
    /// Let a key or a path that names no session open one
    #[arg(long)]
    open_sessions: bool,
    /// What sessions are for that do not say so
    #[arg(long, value_enum, default_value_t)]
    purpose: PurposeName,
    /// Calls of a session, after which its agent is told to stop; 0 is no limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_model_calls: u64,
    /// Folder for a JSONL file of each session, a line a call
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Sessions that are kept
    #[arg(long, value_name = "N", default_value_t = 4096)]
    max_sessions: usize,
    /// Memory that one session's calls may take
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    max_session_bytes: ByteSize,
    /// Memory that the calls of all sessions may take
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    max_total_bytes: ByteSize,
    /// Time after which a session that nobody uses gives way to a new one
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    session_timeout: Duration,
    /// Largest request
    #[arg(long, value_name = "SIZE", default_value = "8MiB")]
    max_request_bytes: ByteSize,
    #[command(flatten)]
    engine: EngineArgs,
    /// Time that requests under way get when the proxy is asked to stop
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    grace: Duration,
}

/// How the upstream is asked.
#[derive(Debug, Args)]
struct UpstreamArgs {
    /// Model that the upstream is asked for, whatever the agent names
    #[arg(long, value_name = "NAME", requires = "upstream")]
    upstream_model: Option<String>,
    /// Environment variable that holds the upstream's key
    #[arg(long, value_name = "NAME", requires = "upstream")]
    upstream_key_env: Option<String>,
    /// Roots that the upstream's certificate must lead to (PEM) [default: those of the web]
    #[arg(long, value_name = "FILE", requires = "upstream")]
    upstream_tls_ca: Option<PathBuf>,
    /// Certificate that the upstream is shown (PEM)
    #[arg(long, value_name = "FILE", requires = "upstream")]
    upstream_tls_cert: Option<PathBuf>,
    /// Private key of `--upstream-tls-cert` (PEM) [default: in the same file]
    #[arg(long, value_name = "FILE", requires = "upstream_tls_cert")]
    upstream_tls_key: Option<PathBuf>,
    /// Ask the upstream to stream its answers
    #[arg(long, requires = "upstream")]
    upstream_stream: bool,
    /// Do not ask the upstream for token ids: nothing can be learned from its calls then
    #[arg(long, requires = "upstream")]
    upstream_without_ids: bool,
    /// Longest that an answer of the upstream may take
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    upstream_timeout: Duration,
    /// Longest that the upstream may say nothing while it streams
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = parse_duration)]
    upstream_stall_timeout: Duration,
    /// Largest answer of the upstream
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    max_upstream_bytes: ByteSize,
}

impl UpstreamArgs {
    fn config(&self, url: &str, max_calls: usize) -> Result<UpstreamConfig, Failure> {
        require_http("--upstream", url)?;
        let tls = TlsFiles {
            certificate: self.upstream_tls_cert.clone(),
            key: self.upstream_tls_key.clone(),
            ca: self.upstream_tls_ca.clone(),
        };
        require_tls_for(&tls, "--upstream-tls-", "--upstream", url)?;
        Ok(UpstreamConfig {
            model: self.upstream_model.clone(),
            api_key: secret(self.upstream_key_env.as_deref()).map_err(Failure::usage)?,
            tls,
            is_streamed: self.upstream_stream,
            asks_for_ids: !self.upstream_without_ids,
            timeout: self.upstream_timeout,
            stall_timeout: self.upstream_stall_timeout,
            max_response_bytes: bytes(self.max_upstream_bytes),
            // Each waits on a thread of its own.
            max_calls: max_calls.min(256),
            ..UpstreamConfig::new(url)
        })
    }
}

fn bytes(size: ByteSize) -> usize {
    usize::try_from(size.0).unwrap_or(usize::MAX)
}

pub(in crate::cli) fn run(args: &ProxyArgs, printer: &Printer) -> Outcome {
    let admin_key = api_key(args.admin_key_env.as_deref()).map_err(Failure::usage)?;
    let tls = args.network.tls()?;
    args.engine.check()?;
    if admin_key.is_none() && !args.listen.ip().is_loopback() {
        printer.note(
            "Anybody who reaches this address can read and delete what is captured: \
             `--admin-key-env` sets a key",
        );
    }
    let (backend, thread, what) = backend(args)?;
    let config = ProxyConfig {
        admin_key,
        rate_limit: args.network.rate_limit,
        opens_sessions: args.open_sessions,
        purpose: match args.purpose {
            PurposeName::Auto => Purpose::Auto,
            PurposeName::Train => Purpose::Train,
            PurposeName::Eval => Purpose::Eval,
        },
        max_model_calls: args.max_model_calls,
        max_body_bytes: bytes(args.max_request_bytes),
        max_sessions: args.max_sessions,
        max_session_bytes: args.max_session_bytes.0,
        max_total_bytes: args.max_total_bytes.0,
        session_timeout: args.session_timeout,
        out: args.out.clone(),
    };
    let router = proxy::router(backend, config);
    on_runtime(args.listen, tls, async |listener, stop| {
        let url = listener.url().map_err(Failure::internal)?;
        printer.note(&format!("Capturing at {url}/v1 what {what}"));
        http::serve(listener, router, stop, args.grace).await;
        Ok(())
    })?;
    if let Some(thread) = thread {
        // The thread ends once its handles are gone; it panicked only if it has said so.
        let _ = thread.join();
    }
    printer.note("Stopped");
    Ok(ExitStatus::Success)
}

/// Returns who answers, the thread to wait for in the end, and what it is, for people.
fn backend(args: &ProxyArgs) -> Result<(Backend, Option<JoinHandle<()>>, String), Failure> {
    if let Some(url) = &args.upstream {
        let config = args.of_upstream.config(url, args.engine.max_requests())?;
        let backend = Backend::Upstream(Upstream::new(config).map_err(Failure::usage)?);
        return Ok((backend, None, format!("{} answers", shown(url))));
    }
    let loaded = setup::load_model(&args.model)?;
    let Served {
        engine,
        thread,
        model,
        limits,
    } = args
        .engine
        .start(&loaded, args.served_model_name.as_deref())?;
    let what = format!("`{}` answers, with {limits}", model.name);
    Ok((Backend::Engine { engine, model }, Some(thread), what))
}
