//! The server's side.

use std::io;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::server::{NoClientAuth, NoServerSessionStorage, WebPkiClientVerifier};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::{Credentials, HTTP, Reloading, TlsError, TlsFiles, provider, root_store};

/// What a server shows to its clients, and asks of them.
#[derive(Debug)]
pub struct ServerTls {
    config: Reloading<ServerConfig>,
}

impl ServerTls {
    /// Reads the files. With [`TlsFiles::ca`], clients must show a certificate that leads to one of its
    /// roots.
    ///
    /// # Errors
    ///
    /// Fails where there is no certificate, or the files cannot be used.
    pub fn new(files: TlsFiles) -> Result<Self, TlsError> {
        Ok(Self {
            config: Reloading::new(files, server_config)?,
        })
    }

    /// Shakes hands; takes as long as the client likes.
    ///
    /// # Errors
    ///
    /// Fails where they do not come together. The client has been told why, and the connection is left.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> Result<TlsStream<S>, (io::Error, S)> {
        TlsAcceptor::from(self.config.current())
            .accept(stream)
            .into_fallible()
            .await
    }
}

/// Each has sessions of its own: none from before a change is resumed, whose client may be let in no more.
fn server_config(credentials: &Credentials) -> Result<ServerConfig, TlsError> {
    let identity = credentials.identity.as_ref().ok_or(TlsError::NoIdentity)?;
    let verifier = match &credentials.roots {
        Some(roots) => {
            let roots = root_store(roots);
            WebPkiClientVerifier::builder_with_provider(roots.into(), provider()).build()?
        }
        None => Arc::new(NoClientAuth),
    };
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Identity)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(identity.chain.clone(), identity.key.clone_key())
        .map_err(TlsError::Identity)?;
    if credentials.roots.is_some() {
        // A session that is resumed is not asked for its certificate, which may have expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    config.alpn_protocols = vec![HTTP.to_vec()];
    Ok(config)
}
