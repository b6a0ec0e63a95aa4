//! `wardian sandboxd`: commands and files of the machine that it runs in, over HTTP, and the machine as an
//! environment of OpenEnv's protocol.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::serving::on_runtime;
use crate::actor::User;
use crate::actor::sandboxd::{BearerToken, MachineConfig, Server, ServerLimits};
use crate::cli::ExitStatus;
use crate::cli::args::parse_duration;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::printer::Printer;
use crate::http::tls::{ServerTls, TlsFiles};
use crate::openenv::{self, Environment, ServerConfig};

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
    /// Folder that commands of OpenEnv's clients start in [default: the server's own]
    #[arg(long, value_name = "FOLDER")]
    workdir: Option<PathBuf>,
    /// Put `--workdir` back at each reset as it was when the server started
    #[arg(long, requires = "workdir")]
    fresh_workdir: bool,
    /// User and group of commands of OpenEnv's clients, by their numbers [default: the server's own]
    #[arg(long, value_name = "UID[:GID]", value_parser = parse_user)]
    user: Option<User>,
}

/// Reads a user; the group has the same number unless it is given.
fn parse_user(text: &str) -> Result<User, String> {
    let (uid, gid) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| {
        (text.parse()).map_err(|_| format!("`{text}` is no number of a user or a group"))
    };
    Ok(User {
        uid: number(uid)?,
        gid: number(gid)?,
    })
}

/// Returns who this process is.
fn own_user() -> User {
    User {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    }
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
    let workdir = match &args.workdir {
        Some(folder) => folder.clone(),
        None => std::env::current_dir().map_err(Failure::internal)?,
    };
    // What the image says of where its programs are; the rest may be secret.
    let env = BTreeMap::from_iter(std::env::var("PATH").map(|path| ("PATH".to_owned(), path)));
    let machine = server.machine(MachineConfig {
        workdir,
        is_fresh: args.fresh_workdir,
        user: args.user.unwrap_or_else(own_user),
        env,
    });
    let environment = Environment::Shell {
        machine: machine.map_err(Failure::usage)?,
    };
    let config = ServerConfig {
        max_sessions: 1,
        api_key: Some(server.api_key()),
        threads: 1,
        ..ServerConfig::default()
    };
    let beside = openenv::Server::new(environment, config).map_err(Failure::internal)?;
    on_runtime(args.listen, tls, async |listener, stop| {
        let url = listener.url().map_err(Failure::internal)?;
        printer.note(&format!("Serving this machine at {url}"));
        let router = server.router(beside.router());
        let serving = beside.serve_as(router, listener, stop, args.grace);
        let served = server.look_after(serving).await;
        served.map_err(Failure::internal)
    })?;
    printer.note("Stopped");
    Ok(ExitStatus::Success)
}
