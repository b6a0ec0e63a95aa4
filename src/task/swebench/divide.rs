//! Parting the instances: most to learn from, the others to measure on.

use std::collections::{BTreeMap, BTreeSet};

use super::SwebenchInstance;

/// The instances, in two parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwebenchSplit {
    /// Those to learn from, in the file's order.
    pub train: Vec<SwebenchInstance>,
    /// Those to measure on, in the file's order.
    pub validation: Vec<SwebenchInstance>,
}

/// Takes `validation` of the instances apart to measure on; 100 of the 500 of Verified are usual.
///
/// Each repository gives its share, by the largest remainder. Which of its instances it gives
/// follows from `seed` and their ids alone, so the order of the file does not matter.
#[must_use]
pub fn divide(instances: Vec<SwebenchInstance>, validation: usize, seed: u64) -> SwebenchSplit {
    let ids = instances.iter();
    let ids = ids.map(|instance| (instance.instance_id.as_str(), instance.repo.as_str()));
    let chosen = held_out(ids, validation, seed);
    let (validation, train) = instances
        .into_iter()
        .partition(|instance| chosen.contains(&instance.instance_id));
    SwebenchSplit { train, validation }
}

/// Returns which of these ids, each with its repository, are measured on.
pub(in crate::task) fn held_out<'a>(
    instances: impl Iterator<Item = (&'a str, &'a str)>,
    validation: usize,
    seed: u64,
) -> BTreeSet<String> {
    let mut total = 0;
    let mut repositories: BTreeMap<String, Vec<([u8; 32], String)>> = BTreeMap::new();
    for (id, repo) in instances {
        total += 1;
        let rank = blake3::Hasher::new()
            .update(&seed.to_le_bytes())
            .update(id.as_bytes())
            .finalize();
        let ids = repositories.entry(repo.to_owned()).or_default();
        ids.push((*rank.as_bytes(), id.to_owned()));
    }
    let wanted = validation.min(total);
    // The whole part of each share, and what is left of it.
    let mut shares: Vec<(usize, usize, &String)> = (repositories.iter())
        .map(|(repo, ids)| {
            let share = ids.len() * wanted;
            (share % total.max(1), share / total.max(1), repo)
        })
        .collect();
    let given: usize = shares.iter().map(|(_, whole, _)| whole).sum();
    shares.sort_by(|one, other| other.0.cmp(&one.0).then(one.2.cmp(other.2)));
    for (_, whole, _) in shares.iter_mut().take(wanted - given) {
        *whole += 1;
    }
    let mut chosen = BTreeSet::new();
    for (_, count, repo) in &shares {
        let mut ids = repositories[*repo].clone();
        ids.sort();
        chosen.extend(ids.into_iter().take(*count).map(|(_, id)| id));
    }
    chosen
}
