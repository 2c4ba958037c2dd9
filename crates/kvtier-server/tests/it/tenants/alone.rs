//! What tenants see when nothing is evicted: each of them alone, as a few sets.

use std::collections::HashSet;
use std::ops::Range;

/// A chunk of a prompt of a tenant.
type Chunk = (usize, usize, u64);

/// A lookup in flight.
struct Lookup {
    connection: usize,
    tenant: usize,
    request: usize,
    hits: u64,
    leased: HashSet<u64>,
    freed: HashSet<u64>,
}

/// All tenants. A request is about one prompt, which has its number.
#[derive(Default)]
pub struct Model {
    /// In L1 or below.
    stored: HashSet<Chunk>,
    in_l1: HashSet<Chunk>,
    lookups: Vec<Lookup>,
}

impl Model {
    pub fn store(&mut self, tenant: usize, prompt: usize, chunks: Range<u64>) {
        let all = chunks.map(|chunk| (tenant, prompt, chunk));
        self.stored.extend(all.clone());
        self.in_l1.extend(all);
    }

    /// Chunks that a lookup finds among the first `asked`.
    pub fn lookup(&mut self, connection: usize, tenant: usize, request: usize, asked: u64) -> u64 {
        let is_stored = |chunk: &u64| self.stored.contains(&(tenant, request, *chunk));
        let hits = (0..asked).take_while(is_stored).count() as u64;
        self.in_l1
            .extend((0..hits).map(|chunk| (tenant, request, chunk)));
        self.lookups.retain(|lookup| {
            (lookup.connection, lookup.tenant, lookup.request) != (connection, tenant, request)
        });
        self.lookups.push(Lookup {
            connection,
            tenant,
            request,
            hits,
            leased: (0..hits).collect(),
            freed: HashSet::new(),
        });
        hits
    }

    /// Whether a worker may read these chunks. From then on its request's lookup does not hold them.
    pub fn retrieve(&mut self, tenant: usize, request: usize, chunks: Range<u64>) -> bool {
        let is_in_l1 = |chunk| self.in_l1.contains(&(tenant, request, chunk));
        let is_here = chunks.clone().all(is_in_l1);
        let mut of_request = self
            .lookups
            .iter_mut()
            .filter(|lookup| (lookup.tenant, lookup.request) == (tenant, request));
        let grants = |lookup: &Lookup| {
            chunks.end <= lookup.hits && !chunks.clone().any(|chunk| lookup.freed.contains(&chunk))
        };
        let is_granted = of_request.by_ref().any(|lookup| grants(lookup));
        let settled = self.lookups.iter_mut().find(|lookup| {
            (lookup.tenant, lookup.request) == (tenant, request) && !lookup.leased.is_empty()
        });
        if let Some(lookup) = settled {
            lookup.leased.retain(|chunk| !chunks.contains(chunk));
        }
        is_granted && is_here
    }

    /// Whether a lookup holds these chunks for a worker.
    pub fn holds(&self, tenant: usize, request: usize, chunks: &Range<u64>) -> bool {
        let mut of_request = self
            .lookups
            .iter()
            .filter(|lookup| (lookup.tenant, lookup.request) == (tenant, request));
        let is_held = |lookup: &Lookup| chunks.clone().all(|chunk| lookup.leased.contains(&chunk));
        of_request.any(is_held)
    }

    /// A lookup found fewer than there were: what was evicted is forgotten, in both tiers.
    pub fn found_less(&mut self, connection: usize, tenant: usize, request: usize, hits: u64) {
        let mut all = self.lookups.iter_mut();
        let found = all.find(|lookup| {
            (lookup.connection, lookup.tenant, lookup.request) == (connection, tenant, request)
        });
        if let Some(lookup) = found {
            lookup.hits = hits;
            lookup.leased.retain(|chunk| *chunk < hits);
        }
    }

    pub fn free(&mut self, connection: usize, tenant: usize, request: usize, chunks: Range<u64>) {
        for lookup in &mut self.lookups {
            if (lookup.connection, lookup.tenant, lookup.request) == (connection, tenant, request) {
                lookup.leased.retain(|chunk| !chunks.contains(chunk));
                let hits = lookup.hits;
                let freed = chunks.clone().filter(|chunk| *chunk < hits);
                lookup.freed.extend(freed);
            }
        }
    }

    pub fn end(&mut self, connection: usize, request: usize) {
        self.lookups
            .retain(|lookup| (lookup.connection, lookup.request) != (connection, request));
    }

    /// L1 was cleared of all objects without a lease.
    pub fn clear(&mut self) {
        let lookups = &self.lookups;
        self.in_l1.retain(|(tenant, prompt, chunk)| {
            lookups.iter().any(|lookup| {
                (lookup.tenant, lookup.request) == (*tenant, *prompt)
                    && lookup.leased.contains(chunk)
            })
        });
    }
}
