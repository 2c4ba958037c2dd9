//! What a tier holds, for people.

use kvtier_core::object_key::KeyShape;
use kvtier_l2::tier::Tier;
use kvtier_l2::{ErrorKind, L2Error, Listed};

/// Objects that an adapter is asked for at once. Always the same, so that a page of the adapter can be asked for again.
const SLICE: usize = 1000;

/// Pages of the adapter that one call looks through, where most objects are of other models.
const MAX_SLICES: usize = 100;

/// Position at which a listing continues.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cursor {
    /// Page of the adapter; `None` is the first one.
    pub position: Option<String>,
    /// The last object of that page that was looked at.
    pub after: Option<String>,
}

/// A part of a listing.
#[derive(Debug, Default)]
pub struct TierListing {
    /// Objects of the part.
    pub objects: Vec<Listed>,
    /// Start of the next part; `None` at the end.
    pub next: Option<Cursor>,
}

pub(super) fn lost(error: tokio::task::JoinError) -> L2Error {
    L2Error::new(ErrorKind::Unavailable, error.to_string())
}

/// See [`super::L2::list`].
pub(super) async fn list(
    tier: &Tier,
    from: Cursor,
    model: Option<&str>,
    most: usize,
) -> Result<TierListing, L2Error> {
    let mut objects = Vec::new();
    let Cursor {
        mut position,
        mut after,
    } = from;
    for _ in 0..MAX_SLICES {
        let page = tier.list(position.clone(), SLICE).await?;
        let name = |listed: &Listed| listed.key.text().name(KeyShape::Grouped);
        let seen = after.as_ref().and_then(|after| {
            let mut listed = page.objects.iter();
            listed.position(|listed| name(listed) == *after)
        });
        for listed in page
            .objects
            .into_iter()
            .skip(seen.map_or(0, |seen| seen + 1))
        {
            if objects.len() == most {
                let next = Some(Cursor { position, after });
                return Ok(TierListing { objects, next });
            }
            after = Some(name(&listed));
            if model.is_none_or(|model| **listed.key.model_name() == *model) {
                objects.push(listed);
            }
        }
        position = page.next;
        after = None;
        if position.is_none() {
            let next = None;
            return Ok(TierListing { objects, next });
        }
    }
    let next = Some(Cursor { position, after });
    Ok(TierListing { objects, next })
}
