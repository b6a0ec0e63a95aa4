//! A connection whose other side must read on.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// A stream that fails where nothing of what it is to write goes out for a while. Reads are not bounded.
pub(super) struct WriteWithin<S> {
    stream: S,
    within: Duration,
    /// Counts while something waits to go out.
    waits: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteWithin<S> {
    pub(super) fn new(stream: S, within: Duration) -> Self {
        Self {
            stream,
            within,
            waits: None,
        }
    }

    /// Makes what waits for longer than it may an error.
    fn bound<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waits = None;
            return written;
        }
        let until = Instant::now() + self.within;
        let waits = (self.waits).get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        waits.as_mut().poll(context).map(|()| {
            let within = self.within;
            let error = format!("the client read nothing for {within:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, error))
        })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteWithin<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteWithin<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bound(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.bound(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.bound(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.bound(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn who_reads_nothing_is_cut_off() {
        let (near, _far) = tokio::io::duplex(8);
        let mut near = WriteWithin::new(near, Duration::from_millis(50));
        let error = near.write_all(&[0; 40]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn who_reads_on_has_its_time_anew() {
        let (near, mut far) = tokio::io::duplex(8);
        let mut near = WriteWithin::new(near, Duration::from_hours(1));
        let mut context = Context::from_waker(std::task::Waker::noop());
        for _ in 0..3 {
            near.write_all(&[0; 8]).await.unwrap();
            assert!(near.waits.is_none(), "nothing waits");
            let more = Pin::new(&mut near).poll_write(&mut context, &[0]);
            assert!(more.is_pending() && near.waits.is_some());
            far.read_exact(&mut [0; 8]).await.unwrap();
        }
    }
}
