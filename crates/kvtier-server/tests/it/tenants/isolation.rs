//! Random operations of several tenants over several connections, against what each would see alone.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_client::{EngineDrivenWorker, Prompt, Scope};
use proptest::prelude::*;

use super::alone::Model;
use super::bed::server;
use crate::l2::settle;
use crate::support::{PATIENCE, TestServer, bytes, prompt, range};

const TENANTS: usize = 3;
const CONNECTIONS: usize = 2;
const PROMPTS: usize = 3;
const CHUNKS: u64 = 5;

#[derive(Debug, Clone)]
enum Act {
    Store(Range<u64>),
    /// Lookup of this number of first chunks.
    Lookup(u64),
    Retrieve(Range<u64>),
    Free(Range<u64>),
    End,
    /// L1 is emptied once the tier has it all.
    Clear,
}

/// An operation on a connection of a tenant, for the request of the prompt with the same number.
#[derive(Debug, Clone)]
struct Op {
    tenant: usize,
    connection: usize,
    request: usize,
    act: Act,
}

fn chunks() -> impl Strategy<Value = Range<u64>> {
    (0..CHUNKS).prop_flat_map(|start| (Just(start), start + 1..=CHUNKS).prop_map(|(a, b)| a..b))
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (1..=CHUNKS).prop_map(|end| Act::Store(0..end)),
        1 => chunks().prop_map(Act::Store),
        4 => (1..=CHUNKS).prop_map(Act::Lookup),
        3 => (1..=CHUNKS).prop_map(|end| Act::Retrieve(0..end)),
        1 => chunks().prop_map(Act::Retrieve),
        1 => chunks().prop_map(Act::Free),
        1 => Just(Act::End),
        1 => Just(Act::Clear),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = (0..TENANTS, 0..CONNECTIONS, 0..PROMPTS, act());
    let op = op.prop_map(|(tenant, connection, request, act)| Op {
        tenant,
        connection,
        request,
        act,
    });
    prop::collection::vec(op, 1..60)
}

/// Tenants of one round of operations on a server that has seen others.
struct Round<'s> {
    server: &'s TestServer,
    workers: &'s mut [EngineDrivenWorker],
    scopes: Vec<Scope>,
    prompts: Vec<Prompt>,
    model: Model,
    number: u64,
}

/// What is in a chunk of a tenant.
fn content(round: u64, tenant: usize, prompt: usize, chunk: u64, len: usize) -> Vec<u8> {
    let seed = (round * TENANTS as u64 + tenant as u64) * PROMPTS as u64 + prompt as u64;
    bytes(seed, chunk, len)
}

impl<'s> Round<'s> {
    fn new(server: &'s TestServer, workers: &'s mut [EngineDrivenWorker]) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // The first one has no salt, but its prompts are new in each round.
        let salt = |tenant| match tenant {
            0 => String::new(),
            tenant => format!("round {number} tenant {tenant}"),
        };
        let seed = u32::try_from(number).unwrap() * 3;
        let scopes = (0..TENANTS).map(|tenant| Scope::new("tenants").with_salt(salt(tenant)));
        let round = Self {
            server,
            workers,
            scopes: scopes.collect(),
            prompts: (0..3)
                .map(|at| prompt(seed + at, CHUNKS as usize))
                .collect(),
            model: Model::default(),
            number,
        };
        // Each connection is newer than the other's first word, so neither passes for the other after a reconnection.
        for _ in 0..2 {
            for worker in round.workers.iter_mut() {
                worker.connection().end_session("unknown").unwrap();
            }
        }
        round
    }

    fn id(&self, request: usize) -> String {
        format!("{} {request}", self.number)
    }

    fn store(&mut self, op: &Op, chunks: Range<u64>) {
        let (number, tenant, request) = (self.number, op.tenant, op.request);
        let (id, first) = (self.id(request), chunks.start);
        let worker = self.worker(op);
        let len = worker.0.chunk_bytes();
        let source = |at| content(number, tenant, request, first + at, len);
        worker
            .0
            .store(worker.1, range(chunks.clone()), &id, source)
            .unwrap();
        self.model.store(tenant, request, chunks);
    }

    /// The worker of an operation's connection, as one of its tenant, and the prompt.
    fn worker(&mut self, op: &Op) -> (&mut EngineDrivenWorker, &Prompt) {
        let worker = &mut self.workers[op.connection];
        worker.set_salt(self.scopes[op.tenant].cache_salt.clone());
        (worker, &self.prompts[op.request])
    }

    /// Chunks that a lookup finds, and those it would find if nothing was evicted.
    fn lookup(&mut self, op: &Op, asked: u64) -> (u64, u64) {
        let id = self.id(op.request);
        let scope = self.scopes[op.tenant].clone();
        let (worker, prompt) = self.worker(op);
        let connection = worker.connection();
        connection
            .lookup(&scope.scheduler_key(prompt, range(0..asked), &id))
            .unwrap();
        let found = connection.wait_prefetch_status(&id, PATIENCE).unwrap();
        let expected = self
            .model
            .lookup(op.connection, op.tenant, op.request, asked);
        (found.unwrap(), expected)
    }

    /// Whether chunks were read; their bytes are the tenant's own.
    fn retrieve(&mut self, op: &Op, chunks: Range<u64>) -> bool {
        let (number, id) = (self.number, self.id(op.request));
        let (worker, prompt) = self.worker(op);
        let len = worker.chunk_bytes();
        let read = worker.retrieve(prompt, range(chunks.clone()), &id, |at, got| {
            let own = content(number, op.tenant, op.request, chunks.start + at, len);
            assert!(
                got == own,
                "chunk {} is not what was stored",
                chunks.start + at
            );
        });
        read.unwrap().is_some()
    }

    fn free(&mut self, op: &Op, chunks: Range<u64>) {
        let id = self.id(op.request);
        let scope = self.scopes[op.tenant].clone();
        let (worker, prompt) = self.worker(op);
        let key = scope.scheduler_key(prompt, range(chunks.clone()), &id);
        worker.connection().free_lookup_locks(&key).unwrap();
        self.model
            .free(op.connection, op.tenant, op.request, chunks);
    }

    fn end(&mut self, op: &Op) {
        let id = self.id(op.request);
        self.worker(op).0.connection().end_session(&id).unwrap();
        self.model.end(op.connection, op.request);
    }

    /// Runs an operation as if nothing is ever evicted: each answer is what the tenant would get alone.
    fn run_exactly(&mut self, op: &Op) {
        match op.act.clone() {
            Act::Store(chunks) => self.store(op, chunks),
            Act::Lookup(asked) => {
                let (found, expected) = self.lookup(op, asked);
                assert_eq!(found, expected, "{op:?}");
            }
            Act::Retrieve(chunks) => {
                let expected = self.model.retrieve(op.tenant, op.request, chunks.clone());
                assert_eq!(self.retrieve(op, chunks), expected, "{op:?}");
            }
            Act::Free(chunks) => self.free(op, chunks),
            Act::End => self.end(op),
            Act::Clear => {
                settle(self.server);
                self.server.engine().admin().clear(false);
                self.model.clear();
            }
        }
    }

    /// With eviction less may be found, but what is held stays.
    fn run_with_eviction(&mut self, op: &Op) {
        match op.act.clone() {
            Act::Lookup(asked) => {
                let (found, most) = self.lookup(op, asked);
                assert!(found <= most, "{op:?}: {found} of {most}");
                self.model
                    .found_less(op.connection, op.tenant, op.request, found);
            }
            Act::Retrieve(chunks) => {
                let is_held = self.model.holds(op.tenant, op.request, &chunks);
                let may = self.model.retrieve(op.tenant, op.request, chunks.clone());
                let read = self.retrieve(op, chunks);
                assert!(read || !is_held, "{op:?}: what was held was removed");
                assert!(may || !read, "{op:?}: read without having been found");
            }
            Act::Clear => self.server.pass(std::time::Duration::ZERO),
            _ => self.run_exactly(op),
        }
    }

    /// Ends all requests, so that the next round has all of L1.
    fn close(mut self) {
        for connection in 0..CONNECTIONS {
            for request in 0..PROMPTS {
                self.end(&Op {
                    tenant: 0,
                    connection,
                    request,
                    act: Act::End,
                });
            }
        }
        self.server.assert_sound();
    }
}

fn workers(server: &TestServer) -> Vec<EngineDrivenWorker> {
    let scope = Scope::new("tenants");
    let connections = 0..CONNECTIONS as i64;
    connections
        .map(|connection| server.engine_driven(connection + 1, &scope))
        .collect()
}

fn run(cases: u32, server: &TestServer, step: impl Fn(&mut Round<'_>, &Op)) {
    let workers = std::cell::RefCell::new(workers(server));
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(ops in ops())| {
        let mut workers = workers.borrow_mut();
        let mut round = Round::new(server, &mut workers);
        for op in &ops {
            step(&mut round, op);
        }
        round.close();
    });
}

// proves: docs/compare.md#tenants
#[test]
fn each_tenant_sees_results_as_if_alone() {
    let directory = tempfile::tempdir().unwrap();
    let server = server(directory.path(), &["--l2-prefetch-policy", "retain"]);
    run(200, &server, |round, op| round.run_exactly(op));
}

#[test]
fn eviction_mixes_no_tenants_and_spares_leases() {
    let directory = tempfile::tempdir().unwrap();
    // 8 KiB per object: 256 of them in L1, which has at least 2 MiB, and 30 in the tier.
    let tier = format!(
        r#"{{"type":"fs","base_path":"{}","max_capacity_gb":0.00025,"eviction":{{"eviction_policy":"LRU"}}}}"#,
        directory.path().display()
    );
    for policy in ["LRU", "IsolatedLRU", "ARC"] {
        let l1 = ["--l1-size-gb", "0.001", "--eviction-policy", policy];
        let flags = [&l1[..], &["--l2-min-free-gb", "0", "--l2-adapter", &tier]].concat();
        let server = TestServer::start(&flags);
        run(60, &server, |round, op| round.run_with_eviction(op));
        let evicted = server.engine().admin().readings().evicted_objects;
        assert!(evicted > 100, "{policy}: {evicted} objects were evicted");
    }
}
