//! What the commands that serve share: the engine behind the API, the listener, keys and signals.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use bytesize::ByteSize;
use clap::Args;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use super::setup::LoadedModel;
use crate::chat::ToolCallFormat;
use crate::cli::failure::Failure;
use crate::engine::{Engine, EngineConfig, EngineHandle, PrefixCaching, available_memory};
use crate::http::tls::{ServerTls, TlsFiles};
use crate::http::{ApiKey, Listener, Rate};
use crate::openai::ServedModel;
use crate::run::{Policy, RunError};

/// How an engine serves.
#[derive(Debug, Args)]
pub(super) struct EngineArgs {
    /// Longest conversation in tokens, the answer included; 0 is the model's own limit
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    max_model_len: usize,
    /// Memory for keys and values, such as `4GiB` [default: the `--memory-share`]
    #[arg(long, value_name = "SIZE")]
    cache_memory: Option<ByteSize>,
    /// Share of the memory left after loading the model that keys and values may take
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    memory_share: f64,
    /// Compute each prompt whole, even if an earlier one began like it
    #[arg(long)]
    no_prefix_caching: bool,
    /// Most completions that advance at a time; more wait
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_running: usize,
    /// Most completions let in, waiting ones included; more are told to come back (status 429)
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_requests: usize,
    /// How the model writes tool calls: `hermes`, `qwen_xml` or `llama3` [default: by its chat template]
    #[arg(long, value_name = "FORMAT")]
    tool_call_format: Option<ToolCallFormat>,
}

/// An engine at work.
pub(super) struct Served {
    pub(super) engine: EngineHandle,
    pub(super) thread: JoinHandle<()>,
    pub(super) model: ServedModel,
    /// Its limits, for people.
    pub(super) limits: String,
}

impl EngineArgs {
    /// Checks what clap does not.
    pub(super) fn check(&self) -> Result<(), Failure> {
        if self.memory_share > 0.0 && self.memory_share <= 1.0 {
            return Ok(());
        }
        let message = format!("`--memory-share` is {}, not in (0, 1]", self.memory_share);
        Err(Failure::usage(anyhow::anyhow!(message)))
    }

    /// Returns the most completions at a time.
    pub(super) fn max_requests(&self) -> usize {
        self.max_requests
    }

    /// Starts the engine of a model, which clients call `name`.
    pub(super) fn start(
        &self,
        loaded: &LoadedModel,
        name: Option<&str>,
    ) -> Result<Served, Failure> {
        let policy = &loaded.policy;
        let engine = self.new_engine(policy).map_err(Failure::from)?;
        let limits = format!(
            "{} tokens of context, {} tokens of keys and values",
            engine.max_context(),
            engine.config().max_cache_tokens,
        );
        let model = policy.served(name.unwrap_or(&loaded.name), self.tool_call_format);
        let (engine, thread) =
            EngineHandle::start(engine, self.max_requests).map_err(Failure::internal)?;
        Ok(Served {
            engine,
            thread,
            model,
            limits,
        })
    }

    fn new_engine(&self, policy: &Policy) -> Result<Engine, RunError> {
        let share = || {
            let available = available_memory(policy.decoder.device())?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a share of a number of bytes"
            )]
            let share = (available as f64 * self.memory_share) as u64;
            Some(share)
        };
        let config = EngineConfig {
            max_cache_bytes: self.cache_memory.map(|size| size.0).or_else(share),
            max_context: self.max_model_len,
            max_running: self.max_running,
            prefix_caching: match self.no_prefix_caching {
                true => PrefixCaching::Off,
                false => PrefixCaching::All,
            },
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(std::sync::Arc::clone(&policy.decoder), config)?;
        engine.set_tokenizer(policy.tokenizer.clone());
        Ok(engine)
    }
}

/// Who is let in, and how.
#[derive(Debug, Args)]
pub(super) struct NetworkArgs {
    /// Speak TLS with this certificate (PEM), followed by those between it and its root; read again when it
    /// changes
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// Private key of `--tls-cert` (PEM) [default: in the same file]
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Refuse clients without a certificate that leads to one of these roots (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Requests of one client, by its key or else its address, such as `10/s`, `600/m` or, with as many at
    /// once, `10/s:50`; more are told to come back (status 429) [default: no limit]
    #[arg(long, value_name = "RATE")]
    pub(super) rate_limit: Option<Rate>,
}

impl NetworkArgs {
    /// Reads the certificate, if there is one.
    pub(super) fn tls(&self) -> Result<Option<ServerTls>, Failure> {
        let files = TlsFiles {
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            ca: self.tls_client_ca.clone(),
        };
        match files.is_empty() {
            true => Ok(None),
            false => ServerTls::new(files).map(Some).map_err(Failure::usage),
        }
    }
}

/// Listens, and runs `serve` with what is ready when the process is asked to stop.
pub(super) fn on_runtime(
    listen: SocketAddr,
    tls: Option<ServerTls>,
    serve: impl AsyncFnOnce(Listener, StopSignal) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .build()
        .map_err(Failure::internal)?;
    runtime.block_on(async {
        let listener = TcpListener::bind(listen)
            .await
            .with_context(|| format!("listening on {listen}"))
            .map_err(Failure::usage)?;
        let stop = stop_signal().map_err(Failure::internal)?;
        serve(Listener::new(listener, tls), stop).await
    })?;
    // Connections that are still open hold what is served; the runtime's end drops them.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// Refuses to show runs to a network without a key: everything that a model and its tasks said is in them.
pub(super) fn require_key(listen: SocketAddr, key: Option<&ApiKey>) -> Result<(), Failure> {
    if key.is_some() || listen.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    let message = format!(
        "the dashboard at {listen} would show runs to everybody: name the variable that holds a key, or \
         listen on 127.0.0.1"
    );
    Err(Failure::usage(anyhow::anyhow!(message)))
}

/// Reads the key that clients must send from the variable that is named.
pub(super) fn api_key(variable: Option<&str>) -> anyhow::Result<Option<ApiKey>> {
    Ok(secret(variable)?.map(|key| ApiKey::new(&key)))
}

/// Reads a key from the variable that is named.
pub(super) fn secret(variable: Option<&str>) -> anyhow::Result<Option<String>> {
    let Some(variable) = variable else {
        return Ok(None);
    };
    let key = std::env::var(variable)
        .with_context(|| format!("reading the API key from the variable `{variable}`"))?;
    anyhow::ensure!(!key.trim().is_empty(), "the variable `{variable}` is empty");
    Ok(Some(key.trim().to_owned()))
}

pub(super) type StopSignal = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Is ready when the process is asked to stop. A second time ends it at once.
fn stop_signal() -> std::io::Result<StopSignal> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(Box::pin(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }))
}
