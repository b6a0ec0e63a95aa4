//! Images of registries: what they are called, and whether they are there.

mod reference;
mod registry;

pub use self::reference::ImageReference;
pub(crate) use self::registry::base64;
pub use self::registry::{Registry, RegistryOptions};
