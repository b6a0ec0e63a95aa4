//! Templates that a run made, until they are too old to make actors of.

use std::collections::BTreeMap;

use super::DAY;
use crate::http::unix_seconds;

/// What a template is of: the image, and the memory of its actors.
pub(super) type Kind = (String, u64);

/// Templates that were made here, each with when that was, in seconds since 1970.
///
/// Their names say that nobody needs them after a day and an hour, and whoever opens the atespace then deletes them.
/// So actors are made of them for half a day; what was begun by then has the other half to start from its tags.
#[derive(Debug, Default)]
pub(super) struct Templates {
    made: BTreeMap<Kind, (String, u64)>,
    /// Those that actors may still be of.
    old: Vec<String>,
}

impl Templates {
    /// Returns the template of a kind, if there is one that is young enough.
    pub(super) fn get(&mut self, kind: &Kind) -> Option<String> {
        self.get_at(kind, unix_seconds())
    }

    fn get_at(&mut self, kind: &Kind, now: u64) -> Option<String> {
        let (name, since) = self.made.get(kind)?;
        if now.saturating_sub(*since) < DAY.as_secs() / 2 {
            return Some(name.clone());
        }
        let old = self.made.remove(kind);
        self.old.extend(old.map(|(name, _)| name));
        None
    }

    /// Takes one that was made just now.
    pub(super) fn insert(&mut self, kind: Kind, name: String) {
        self.insert_at(kind, name, unix_seconds());
    }

    fn insert_at(&mut self, kind: Kind, name: String, now: u64) {
        self.made.insert(kind, (name, now));
    }

    /// Returns the names of all, old ones included.
    pub(super) fn into_names(self) -> impl Iterator<Item = String> {
        let made = self.made.into_values().map(|(name, _)| name);
        self.old.into_iter().chain(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_made_anew_long_before_its_name_expires() {
        let kind = |image: &str| (image.to_owned(), 1);
        let half = DAY.as_secs() / 2;
        let mut templates = Templates::default();
        templates.insert_at(kind("a"), "first".to_owned(), 100);
        assert_eq!(templates.get_at(&kind("b"), 100), None);
        let young = templates.get_at(&kind("a"), 99 + half);
        assert_eq!(young.as_deref(), Some("first"));
        assert_eq!(templates.get_at(&kind("a"), 100 + half), None);
        templates.insert_at(kind("a"), "second".to_owned(), 100 + half);
        let again = templates.get_at(&kind("a"), 101 + half);
        assert_eq!(again.as_deref(), Some("second"));
        // All are deleted in the end.
        let names: Vec<_> = templates.into_names().collect();
        assert_eq!(names, ["first", "second"]);
    }
}
