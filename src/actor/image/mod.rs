//! Images: what they are called, whether a registry has them, and what builds those that are not there.

mod buildah;
mod builder;
mod recipe;
mod reference;
mod registry;
mod turns;
mod workdir;

pub use self::buildah::{Buildah, BuildahOptions};
pub use self::builder::{Built, ImageBuilder};
pub use self::recipe::Recipe;
pub use self::reference::ImageReference;
pub(crate) use self::registry::base64;
pub use self::registry::{Registry, RegistryOptions};
#[cfg(feature = "k8s")]
pub(super) use self::turns::Turns;
