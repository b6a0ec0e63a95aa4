//! `wardian sandboxd`: commands and files of the machine that it runs in, over HTTP.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::serving::on_runtime;
use crate::actor::sandboxd::{BearerToken, Server, ServerLimits};
use crate::cli::ExitStatus;
use crate::cli::args::parse_duration;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::http::tls::{ServerTls, TlsFiles};

/// Arguments of `wardian sandboxd`.
#[derive(Debug, Args)]
pub(in crate::cli) struct SandboxdArgs {
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:80")]
    listen: SocketAddr,
    /// File with the token that clients must send, of at least 16 characters
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present = "token_env",
        conflicts_with = "token_env"
    )]
    token_file: Option<PathBuf>,
    /// Environment variable that holds the token
    #[arg(long, value_name = "NAME")]
    token_env: Option<String>,
    /// Speak TLS with this certificate (PEM), with its key in the same file unless `--tls-key` is given; read
    /// again when it changes
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// Private key of `--tls-cert` (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Refuse clients without a certificate that leads to one of these roots (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Time that requests under way get when the server is asked to stop
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    grace: Duration,
}

pub(in crate::cli) fn run(args: &SandboxdArgs, printer: &Printer) -> Outcome {
    let token = match &args.token_file {
        Some(path) => BearerToken::from_file(path),
        // One of them is there.
        None => BearerToken::from_variable(args.token_env.as_deref().unwrap_or_default()),
    };
    let token = token.map_err(Failure::usage)?;
    let files = TlsFiles {
        certificate: args.tls_cert.clone(),
        key: args.tls_key.clone(),
        ca: args.tls_client_ca.clone(),
    };
    let tls = match files.is_empty() {
        true => None,
        false => Some(ServerTls::new(files).map_err(Failure::usage)?),
    };
    let server = Server::new(&token, ServerLimits::default()).map_err(Failure::internal)?;
    on_runtime(args.listen, tls, async |listener, stop| {
        let url = listener.url().map_err(Failure::internal)?;
        printer.note(&format!("Serving this machine at {url}"));
        let served = server.serve(listener, stop, args.grace).await;
        served.map_err(Failure::internal)
    })?;
    printer.note("Stopped");
    Ok(ExitStatus::Success)
}
