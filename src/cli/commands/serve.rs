//! `wardian serve`: the OpenAI API in front of a model, or environments over OpenEnv's protocol.

use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use anyhow::Context as _;
use bytesize::ByteSize;
use clap::Args;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use super::serve_env::{EnvArgs, EnvironmentName};
use super::setup;
use crate::chat::ToolCallFormat;
use crate::cli::ExitStatus;
use crate::cli::args::{ModelArgs, parse_duration};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::engine::{Engine, EngineConfig, EngineHandle, PrefixCaching, available_memory};
use crate::http::{self, ApiKey};
use crate::openai::{self, ServedModel, ServerConfig};
use crate::run::{Policy, RunError};

/// Arguments of `wardian serve`.
#[derive(Debug, Args)]
pub(in crate::cli) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    environment: EnvArgs,
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Name that clients call the model by [default: as given with `--model`, or `starter`]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Environment variable that holds the key which clients must send [default: no key is asked]
    #[arg(long, value_name = "NAME")]
    api_key_env: Option<String>,
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
    /// Largest request
    #[arg(long, value_name = "SIZE", default_value = "8MiB")]
    max_request_bytes: ByteSize,
    /// How the model writes tool calls: `hermes`, `qwen_xml` or `llama3` [default: by its chat template]
    #[arg(long, value_name = "FORMAT")]
    tool_call_format: Option<ToolCallFormat>,
    /// Time that requests under way get when the server is asked to stop
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    grace: Duration,
}

pub(in crate::cli) fn run(args: &ServeArgs, printer: &Printer) -> Outcome {
    let api_key = api_key(args.api_key_env.as_deref()).map_err(Failure::usage)?;
    if let Some(name) = args.environment.env {
        return run_environment(args, name, api_key, printer);
    }
    if !(args.memory_share > 0.0 && args.memory_share <= 1.0) {
        let message = format!("`--memory-share` is {}, not in (0, 1]", args.memory_share);
        return Err(Failure::usage(anyhow::anyhow!(message)));
    }
    let loaded = setup::load_model(&args.model)?;
    let policy = &loaded.policy;
    let engine = new_engine(args, policy).map_err(Failure::from)?;
    let limits = format!(
        "{} tokens of context, {} tokens of keys and values",
        engine.max_context(),
        engine.config().max_cache_tokens,
    );
    let model = ServedModel {
        name: args.served_model_name.clone().unwrap_or(loaded.name),
        tokenizer: policy.tokenizer.clone(),
        template: policy.template.clone(),
        stop_token_ids: policy.stop_token_ids.clone(),
        tool_call_format: args
            .tool_call_format
            .unwrap_or_else(|| ToolCallFormat::detect(policy.template.source())),
    };
    let config = ServerConfig {
        api_key,
        max_body_bytes: usize::try_from(args.max_request_bytes.0).unwrap_or(usize::MAX),
        ..ServerConfig::default()
    };
    let name = model.name.clone();
    let (engine, thread) =
        EngineHandle::start(engine, args.max_requests).map_err(Failure::internal)?;
    let router = openai::router(engine, model, config);
    on_runtime(args.listen, async |listener, stop| {
        let address = listener.local_addr().map_err(Failure::internal)?;
        printer.note(&format!(
            "Serving `{name}` at http://{address}/v1 with {limits}"
        ));
        http::serve(listener, router, stop, args.grace).await;
        Ok(())
    })?;
    // The thread ends once its handles are gone; it panicked only if it has said so.
    let _ = thread.join();
    printer.note("Stopped");
    Ok(ExitStatus::Success)
}

fn run_environment(
    args: &ServeArgs,
    name: EnvironmentName,
    api_key: Option<ApiKey>,
    printer: &Printer,
) -> Outcome {
    let max_bytes = usize::try_from(args.max_request_bytes.0).unwrap_or(usize::MAX);
    let server = args.environment.server(name, api_key, max_bytes, printer)?;
    on_runtime(args.listen, async |listener, stop| {
        let address = listener.local_addr().map_err(Failure::internal)?;
        printer.note(&format!(
            "Serving the environment `{}` at http://{address}",
            server.name()
        ));
        server.serve(listener, stop, args.grace).await;
        Ok(())
    })?;
    printer.note("Stopped");
    Ok(ExitStatus::Success)
}

/// Listens, and runs `serve` with what is ready when the process is asked to stop.
fn on_runtime(
    listen: SocketAddr,
    serve: impl AsyncFnOnce(TcpListener, StopSignal) -> Result<(), Failure>,
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
        serve(listener, stop).await
    })?;
    // Connections that are still open hold what is served; the runtime's end drops them.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

fn api_key(variable: Option<&str>) -> anyhow::Result<Option<ApiKey>> {
    let Some(variable) = variable else {
        return Ok(None);
    };
    let key = std::env::var(variable)
        .with_context(|| format!("reading the API key from the variable `{variable}`"))?;
    anyhow::ensure!(!key.trim().is_empty(), "the variable `{variable}` is empty");
    Ok(Some(ApiKey::new(key.trim())))
}

fn new_engine(args: &ServeArgs, policy: &Policy) -> Result<Engine, RunError> {
    let share = || {
        let available = available_memory(policy.decoder.device())?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a number of bytes"
        )]
        let share = (available as f64 * args.memory_share) as u64;
        Some(share)
    };
    let config = EngineConfig {
        max_cache_bytes: args.cache_memory.map(|size| size.0).or_else(share),
        max_context: args.max_model_len,
        max_running: args.max_running,
        prefix_caching: match args.no_prefix_caching {
            true => PrefixCaching::Off,
            false => PrefixCaching::All,
        },
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(std::sync::Arc::clone(&policy.decoder), config)?;
    engine.set_tokenizer(policy.tokenizer.clone());
    Ok(engine)
}

type StopSignal = Pin<Box<dyn Future<Output = ()> + Send>>;

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
