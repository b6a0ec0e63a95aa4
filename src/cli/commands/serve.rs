//! `wardian serve`: the OpenAI API in front of a model, or environments over OpenEnv's protocol.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytesize::ByteSize;
use clap::Args;

use super::serve_env::{EnvArgs, EnvironmentName};
use super::serving::{EngineArgs, NetworkArgs, Served, api_key, on_runtime, require_key};
use super::setup;
use crate::cli::ExitStatus;
use crate::cli::args::{ModelArgs, parse_duration};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::dashboard::{Dashboard, DashboardConfig, Runs};
use crate::http::tls::ServerTls;
use crate::http::{self, ApiKey};
use crate::openai::{self, ServerConfig};
use crate::openenv;

/// Arguments of `wardian serve`.
#[derive(Debug, Args)]
pub(in crate::cli) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    environment: EnvArgs,
    /// Serve a dashboard of the runs in this folder instead of a model [default without a folder: runs]
    #[arg(
        long,
        value_name = "RUNS",
        num_args = 0..=1,
        default_missing_value = "runs",
        conflicts_with_all = ["model", "overrides", "env"]
    )]
    dashboard: Option<PathBuf>,
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Name that clients call the model by [default: as given with `--model`, or `starter`]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Environment variable that holds the key which clients must send [default: no key is asked]
    #[arg(long, value_name = "NAME")]
    api_key_env: Option<String>,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Largest request
    #[arg(long, value_name = "SIZE", default_value = "8MiB")]
    max_request_bytes: ByteSize,
    /// Time that requests under way get when the server is asked to stop
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    grace: Duration,
}

pub(in crate::cli) fn run(args: &ServeArgs, printer: &Printer) -> Outcome {
    let api_key = api_key(args.api_key_env.as_deref()).map_err(Failure::usage)?;
    let tls = args.network.tls()?;
    if let Some(runs) = &args.dashboard {
        return run_dashboard(args, runs, api_key, tls, printer);
    }
    if let Some(name) = args.environment.env {
        return run_environment(args, name, api_key, tls, printer);
    }
    args.engine.check()?;
    let loaded = setup::load_model(&args.model)?;
    let Served {
        engine,
        thread,
        model,
        limits,
    } = args
        .engine
        .start(&loaded, args.served_model_name.as_deref())?;
    let config = ServerConfig {
        api_key,
        rate_limit: args.network.rate_limit,
        max_body_bytes: usize::try_from(args.max_request_bytes.0).unwrap_or(usize::MAX),
        ..ServerConfig::default()
    };
    let name = model.name.clone();
    let router = openai::router(engine, model, config);
    on_runtime(args.listen, tls, async |listener, stop| {
        let url = listener.url().map_err(Failure::internal)?;
        printer.note(&format!("Serving `{name}` at {url}/v1 with {limits}"));
        http::serve(listener, router, stop, args.grace).await;
        Ok(())
    })?;
    // The thread ends once its handles are gone; it panicked only if it has said so.
    let _ = thread.join();
    printer.note("Stopped");
    Ok(ExitStatus::Success)
}

fn run_dashboard(
    args: &ServeArgs,
    runs: &Path,
    api_key: Option<ApiKey>,
    tls: Option<ServerTls>,
    printer: &Printer,
) -> Outcome {
    require_key(args.listen, api_key.as_ref())?;
    if !runs.is_dir() {
        let message = format!(
            "`{}` is no folder; name the one that runs are in",
            runs.display()
        );
        return Err(Failure::usage(anyhow::anyhow!(message)));
    }
    let dashboard = Dashboard::new(DashboardConfig {
        api_key,
        rate_limit: args.network.rate_limit,
        ..DashboardConfig::new(Runs::Below(runs.to_owned()))
    });
    on_runtime(args.listen, tls, async |listener, stop| {
        let url = listener.url().map_err(Failure::internal)?;
        printer.note(&format!(
            "Serving the dashboard of `{}` at {url}",
            runs.display()
        ));
        http::serve(listener, dashboard.router(), stop, args.grace).await;
        Ok(())
    })?;
    printer.note("Stopped");
    Ok(ExitStatus::Success)
}

fn run_environment(
    args: &ServeArgs,
    name: EnvironmentName,
    api_key: Option<ApiKey>,
    tls: Option<ServerTls>,
    printer: &Printer,
) -> Outcome {
    let max_bytes = usize::try_from(args.max_request_bytes.0).unwrap_or(usize::MAX);
    let config = openenv::ServerConfig {
        api_key,
        rate_limit: args.network.rate_limit,
        max_message_bytes: max_bytes,
        ..openenv::ServerConfig::default()
    };
    let server = args.environment.server(name, config, printer)?;
    on_runtime(args.listen, tls, async |listener, stop| {
        let url = listener.url().map_err(Failure::internal)?;
        printer.note(&format!(
            "Serving the environment `{}` at {url}",
            server.name()
        ));
        server.serve(listener, stop, args.grace).await;
        Ok(())
    })?;
    printer.note("Stopped");
    Ok(ExitStatus::Success)
}
