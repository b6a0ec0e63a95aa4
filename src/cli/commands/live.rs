//! The dashboard of a run while it goes.

use std::net::SocketAddr;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use super::serving::{api_key, require_key};
use crate::cli::failure::Failure;
use crate::dashboard::{Dashboard, DashboardConfig, Runs};
use crate::engine::Tokenizer;
use crate::http::{self, ApiKey, Listener};

/// How long answers under way may take when the run is over.
const GRACE: Duration = Duration::from_secs(1);

/// A dashboard that is served on a thread of its own, until this is dropped.
#[derive(Debug)]
pub(super) struct Live {
    /// Where it is.
    pub(super) url: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Where a dashboard will be served, taken before there is anything to show: an address that cannot be had is told
/// before a model is loaded.
#[derive(Debug)]
pub(super) struct Place {
    api_key: Option<ApiKey>,
    listener: TcpListener,
    runtime: Runtime,
}

impl Place {
    pub(super) fn take(listen: SocketAddr, key_variable: Option<&str>) -> Result<Self, Failure> {
        let api_key = api_key(key_variable).map_err(Failure::usage)?;
        require_key(listen, api_key.as_ref())?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .worker_threads(1)
            .build()
            .map_err(Failure::internal)?;
        let listener = (runtime.block_on(TcpListener::bind(listen)))
            .with_context(|| format!("listening on {listen} for the dashboard"))
            .map_err(Failure::usage)?;
        Ok(Self {
            api_key,
            listener,
            runtime,
        })
    }
}

impl Live {
    /// Serves the dashboard of one run.
    pub(super) fn start(place: Place, run: &Path, tokenizer: Tokenizer) -> Result<Self, Failure> {
        let Place {
            api_key,
            listener,
            runtime,
        } = place;
        let dashboard = Dashboard::new(DashboardConfig {
            api_key,
            tokenizer: Some(tokenizer),
            ..DashboardConfig::new(Runs::One(run.to_owned()))
        });
        let listener = Listener::new(listener, None);
        let url = listener.url().map_err(Failure::internal)?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("dashboard".to_owned())
            .spawn(move || {
                let shutdown = async {
                    // Dropped or sent, it is over.
                    let _ = stopped.await;
                };
                runtime.block_on(http::serve(listener, dashboard.router(), shutdown, GRACE));
                runtime.shutdown_timeout(GRACE);
            })
            .map_err(Failure::internal)?;
        Ok(Self {
            url,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // It panicked only if it has said so.
            let _ = thread.join();
        }
    }
}
