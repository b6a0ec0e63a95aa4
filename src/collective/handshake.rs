//! How a rank joins: both sides prove that they know the secret, and the root compares what they are.
//!
//! ```text
//! peer                                    root
//! magic, nonce                      ─►
//!                                   ◄─    nonce, proof
//! proof, rank, version, identity    ─►
//!                                   ◄─    a word: welcome, or why not
//! ```
//!
//! A proof is a keyed hash of both nonces and the prover's side. What follows is neither encrypted nor
//! signed.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use super::CollectiveError;
use super::launch::{Launch, Token};
use super::wire::{FrameError, read_bytes};

const MAGIC: [u8; 8] = *b"WARDIAN1";
/// Most bytes of what a rank says of itself: a run file, mostly.
const MAX_HELLO: u64 = 1 << 20;
/// Most bytes of the reason for which a rank is turned away.
const MAX_VERDICT: u64 = 4096;

type Nonce = [u8; 32];

/// What a rank says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) version: String,
    /// What all must agree on, in lines.
    pub(super) identity: String,
}

impl Hello {
    pub(super) fn new(launch: &Launch, identity: &str) -> Self {
        Self {
            rank: launch.rank,
            world_size: launch.world_size,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            identity: identity.to_owned(),
        }
    }

    /// Returns why `other` cannot work with this rank.
    fn objection(&self, other: &Self) -> Option<String> {
        let (mine, its) = (self.rank, other.rank);
        if self.version != other.version {
            let (mine_is, its_is) = (&self.version, &other.version);
            return Some(format!(
                "rank {its} is version {its_is}, rank {mine} {mine_is}"
            ));
        }
        if self.world_size != other.world_size {
            let (mine_is, its_is) = (self.world_size, other.world_size);
            return Some(format!(
                "rank {its} has `WORLD_SIZE` {its_is}, rank {mine} {mine_is}"
            ));
        }
        if self.identity != other.identity {
            let (mut ours, mut theirs) = (self.identity.lines(), other.identity.lines());
            loop {
                let (our, their) = (ours.next(), theirs.next());
                if our != their || our.is_none() {
                    let line = |line: Option<&str>| line.unwrap_or("nothing").to_owned();
                    let (our, their) = (line(our), line(their));
                    return Some(format!("rank {its} has `{their}`, rank {mine} `{our}`"));
                }
            }
        }
        None
    }
}

/// Why a connection did not become a rank.
#[derive(Debug)]
pub(super) enum Stranger {
    /// It may be anybody: the others are waited for all the same.
    Unknown(String),
    /// It is one of us and does not fit.
    Unfit(String),
}

impl From<FrameError> for Stranger {
    fn from(error: FrameError) -> Self {
        Self::Unknown(error.to_string())
    }
}

impl From<io::Error> for Stranger {
    fn from(error: io::Error) -> Self {
        Self::Unknown(error.to_string())
    }
}

fn proof(token: &Token, side: &str, peer: &Nonce, root: &Nonce) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(&token.key());
    hasher.update(side.as_bytes()).update(peer).update(root);
    hasher.finalize()
}

fn read_array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Lets a connection in, up to the root's verdict; returns what it says of itself.
pub(super) fn receive(
    stream: &mut (impl Read + Write),
    token: &Token,
    own: &Hello,
) -> Result<Hello, Stranger> {
    if read_array(stream)? != MAGIC {
        return Err(Stranger::Unknown("it is no rank of a run".to_owned()));
    }
    let peer: Nonce = read_array(stream)?;
    let root: Nonce = rand::random();
    stream.write_all(&root)?;
    stream.write_all(proof(token, "root", &peer, &root).as_bytes())?;
    stream.flush()?;
    let expected = proof(token, "peer", &peer, &root);
    // The comparison takes the same time wherever they differ.
    if blake3::Hash::from_bytes(read_array(stream)?) != expected {
        return Err(Stranger::Unknown(
            "it has another `WARDIAN_CLUSTER_TOKEN`".to_owned(),
        ));
    }
    let length = u64::from_le_bytes(read_array(stream)?);
    let bytes = read_bytes(stream, length, MAX_HELLO)?;
    let hello: Hello = serde_json::from_slice(&bytes)
        .map_err(|error| Stranger::Unknown(format!("it introduced itself wrongly: {error}")))?;
    match own.objection(&hello) {
        Some(reason) => Err(Stranger::Unfit(reason)),
        None => Ok(hello),
    }
}

/// Tells a rank that it is let in, or why not.
pub(super) fn send_verdict(stream: &mut impl Write, objection: Option<&str>) -> io::Result<()> {
    let text = objection.unwrap_or_default();
    let limit = usize::try_from(MAX_VERDICT).unwrap_or(usize::MAX);
    let text = &text[..text.floor_char_boundary(limit)];
    stream.write_all(&(text.len() as u64).to_le_bytes())?;
    stream.write_all(text.as_bytes())?;
    stream.flush()
}

/// Introduces this rank to the root, up to the verdict, which comes when all are there.
pub(super) fn introduce(
    stream: &mut (impl Read + Write),
    token: &Token,
    own: &Hello,
) -> Result<(), CollectiveError> {
    let lost = |error: io::Error| CollectiveError::Lost {
        rank: 0,
        activity: "joining",
        reason: error.to_string(),
    };
    let peer: Nonce = rand::random();
    let mut first = MAGIC.to_vec();
    first.extend(peer);
    stream.write_all(&first).map_err(lost)?;
    let root: Nonce = read_array(stream).map_err(lost)?;
    let expected = proof(token, "root", &peer, &root);
    if blake3::Hash::from_bytes(read_array(stream).map_err(lost)?) != expected {
        return Err(CollectiveError::Token);
    }
    let hello = serde_json::to_vec(own).map_err(|error| lost(error.into()))?;
    let mut second = proof(token, "peer", &peer, &root).as_bytes().to_vec();
    second.extend((hello.len() as u64).to_le_bytes());
    second.extend(hello);
    stream.write_all(&second).map_err(lost)
}

/// Waits for the root's verdict.
pub(super) fn read_verdict(stream: &mut impl Read) -> Result<(), CollectiveError> {
    let mut read = || {
        let length = u64::from_le_bytes(read_array(stream)?);
        read_bytes(stream, length, MAX_VERDICT)
    };
    match read() {
        Ok(text) if text.is_empty() => Ok(()),
        Ok(text) => Err(CollectiveError::Refused {
            reason: String::from_utf8_lossy(&text).into_owned(),
        }),
        Err(error) => Err(CollectiveError::Lost {
            rank: 0,
            activity: "joining",
            reason: error.to_string(),
        }),
    }
}
