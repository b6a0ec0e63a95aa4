//! The addresses that something is to listen at, and the servers that a run talks to.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use axum::http::Uri;

use super::Scope;
use super::finding::Finding;
use crate::address::shown;
use crate::collective::Launch;
use crate::config::RunConfig;

/// How long a server may take to take a connection.
const CONNECT: Duration = Duration::from_secs(3);
/// How many addresses of a server are tried.
const MOST_ADDRESSES: usize = 4;

pub(super) fn check(scope: &Scope) -> Vec<Finding> {
    let mut findings: Vec<Finding> = scope.listen.iter().map(|address| free(address)).collect();
    match Launch::from_env() {
        Ok(Some(launch)) if launch.rank == 0 => {
            findings.push(free(&format!("0.0.0.0:{}", launch.port)));
        }
        Ok(_) => {}
        Err(error) => findings.push(Finding::wrong(
            "ports",
            error.to_string(),
            "unset RANK WORLD_SIZE, or let `torchrun` or a job set all variables (docs/training.md)",
        )),
    }
    if scope.has_run {
        findings.extend(reach_all(servers(&scope.config)));
    }
    findings
}

/// Looks whether an address can be listened at.
fn free(address: &str) -> Finding {
    let port = address.rsplit(':').next().unwrap_or_default();
    match TcpListener::bind(address) {
        Ok(_) => Finding::fine("ports", format!("`{address}` is free")),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Finding::wrong(
            "ports",
            format!("`{address}` is taken by another program"),
            format!("`ss -ltnp 'sport = :{port}'` says by which; end it, or take another port"),
        ),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Finding::wrong(
            "ports",
            format!("`{address}` cannot be listened at: {error}"),
            "take a port from 1024 up",
        ),
        Err(error) => Finding::wrong(
            "ports",
            format!("`{address}` cannot be listened at: {error}"),
            "give an address of this machine and a port, such as 127.0.0.1:8000",
        ),
    }
}

/// Returns the addresses of environments elsewhere, with their keys.
fn servers(config: &RunConfig) -> Vec<(String, &str)> {
    let environments = (config.environments.iter()).map(|(name, environment)| {
        (
            format!("environments.{name}.env.url"),
            environment.env.as_ref(),
        )
    });
    let own = [("env.url".to_owned(), config.env.as_ref())];
    let all = own.into_iter().chain(environments);
    all.filter_map(|(key, env)| Some((key, env?.url.as_str())))
        .collect()
}

/// Looks at all servers at the same time: one that is away must not use up the time of the others.
fn reach_all(servers: Vec<(String, &str)>) -> Vec<Finding> {
    std::thread::scope(|scope| {
        let looks: Vec<_> = servers
            .into_iter()
            .map(|server| scope.spawn(|| reach(server)))
            .collect();
        let found = looks.into_iter().map(|look| {
            look.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        found.collect()
    })
}

/// Looks whether a server takes connections.
fn reach((key, url): (String, &str)) -> Finding {
    let name = shown(url);
    let connected = host_and_port(url).ok_or_else(|| "it is no address".to_owned());
    let connected = connected.and_then(|(host, port)| {
        let addresses = (host.as_str(), port).to_socket_addrs();
        let addresses = addresses.map_err(|error| error.to_string())?;
        // One of them is enough, as it is for who connects.
        let mut last = "its name has no address".to_owned();
        for address in addresses.take(MOST_ADDRESSES) {
            match TcpStream::connect_timeout(&address, CONNECT) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error.to_string(),
            }
        }
        Err(last)
    });
    match connected {
        Ok(_) => Finding::fine(
            "ports",
            format!("the server of `{key}`, `{name}`, takes connections"),
        ),
        Err(reason) => Finding::wrong(
            "ports",
            format!("the server of `{key}`, `{name}`, does not: {reason}"),
            "start it, such as by `wardian serve --env tasks`, or correct the address",
        ),
    }
}

fn host_and_port(url: &str) -> Option<(String, u16)> {
    let url: Uri = url.parse().ok()?;
    let host = url.host()?.trim_start_matches('[').trim_end_matches(']');
    let standard = match url.scheme_str()? {
        "https" | "wss" => 443,
        _ => 80,
    };
    Some((host.to_owned(), url.port_u16().unwrap_or(standard)))
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    #[test]
    fn a_port_that_is_taken_is_found_and_a_free_one_is_let_go() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let found = free(&address);
        assert_eq!(found.state, State::Wrong, "{found:?}");
        assert!(found.fix.unwrap().contains("ss -ltnp"));
        drop(taken);
        assert_eq!(free(&address).state, State::Fine);
        assert_eq!(
            free(&address).state,
            State::Fine,
            "looking does not keep it"
        );
        assert_eq!(free("nonsense").state, State::Wrong);
    }

    #[test]
    fn a_server_is_reached_by_its_address() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://user:secret@{}/x", server.local_addr().unwrap());
        let found = reach(("env.url".to_owned(), &url));
        assert_eq!(found.state, State::Fine, "{found:?}");
        assert!(!found.about.contains("secret"), "{found:?}");
        drop(server);
        let found = reach(("env.url".to_owned(), &url));
        assert_eq!(found.state, State::Wrong, "{found:?}");
        assert!(!found.about.contains("secret"), "{found:?}");
        assert_eq!(
            host_and_port("https://[::1]/"),
            Some(("::1".to_owned(), 443))
        );
    }
}
