//! Speed of reads from a peer over loopback, beside a plain TCP loop in the same process: objects of 2 MiB, medians of some
//! rounds, and the CPU time of both sides together.
#![expect(clippy::unwrap_used, reason = "a program for developers")]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::object_key::ObjectKey;
use kvtier_l2::conformance::{Memory, content, object};
use kvtier_l2::{Adapter as _, Buffer, LoadItem, ObjectSpec, StoreItem};
use kvtier_l2_resp::{
    Address, ObjectSource, PeersAdapter, PeersOptions, PortOptions, ReadPort, RespAdapter,
    RespOptions,
};

const LEN: u64 = 2 << 20;
const SMALL: u64 = 64 << 10;
const OBJECTS: u64 = 64;
const ROUNDS: usize = 7;

struct Held(Vec<(ObjectSpec, Buffer)>);

impl ObjectSource for Held {
    fn hold(&self, key: &ObjectKey) -> Option<StoreItem> {
        let (object, from) = self.0.iter().find(|(object, _)| object.key == *key)?;
        Some(StoreItem {
            object: object.clone(),
            from: from.clone(),
        })
    }

    fn count_sent(&self, _: u64) {}

    fn count_connection(&self, _: i64) {}
}

fn runtime() -> tokio::runtime::Runtime {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).enable_all().build().unwrap()
}

/// CPU time of this process.
fn cpu() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(clock.tv_sec as u64, clock.tv_nsec as u32)
}

/// GB/s, and seconds of CPU per GB.
fn timed(work: impl FnOnce()) -> (f64, f64) {
    let (began, before) = (Instant::now(), cpu());
    work();
    let gigabytes = (OBJECTS * LEN) as f64 / 1e9;
    let used = (cpu() - before).as_secs_f64();
    (gigabytes / began.elapsed().as_secs_f64(), used / gigabytes)
}

/// A plain loop of sends, and of receives into place.
fn plain(connections: u64) -> (f64, f64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let from = vec![7; (OBJECTS * LEN) as usize];
    let mut to = vec![1; from.len()];
    let part = from.len() / connections as usize;
    let pairs: Vec<_> = (0..connections)
        .map(|_| {
            let near = TcpStream::connect(address).unwrap();
            (near, listener.accept().unwrap().0)
        })
        .collect();
    timed(|| {
        std::thread::scope(|scope| {
            let parts = from.chunks(part).zip(to.chunks_mut(part));
            for ((mut near, mut far), (from, to)) in pairs.into_iter().zip(parts) {
                scope.spawn(move || {
                    from.chunks(LEN as usize)
                        .for_each(|it| far.write_all(it).unwrap())
                });
                scope.spawn(move || {
                    to.chunks_mut(LEN as usize)
                        .for_each(|it| near.read_exact(it).unwrap())
                });
            }
        });
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let objects: Vec<_> = (0..OBJECTS).map(|number| object(number, LEN)).collect();
    let memory = Memory::new(2 * OBJECTS * LEN + 8 * SMALL);
    let small: Vec<_> = (0..4)
        .map(|number| object(OBJECTS + number, SMALL))
        .collect();
    let all = objects.iter().chain(&small);
    let held = all.map(|it| (it.clone(), memory.filled(&content(it))));
    let held = Arc::new(Held(held.collect()));
    let (theirs, ours) = (runtime(), runtime());
    let port = ReadPort::new(PortOptions::default(), held).unwrap();
    let listener = theirs
        .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
        .unwrap();
    let number = listener.local_addr().unwrap().port();
    theirs.spawn(port.serve(listener));

    println!("connections  what             GB/s   of plain  CPU s per GB (both sides)  of plain");
    for connections in [1, 4] {
        let within = ours.enter();
        let mut options = PeersOptions::new(
            vec![("127.0.0.1".to_owned(), number)],
            Duration::from_secs(5),
        );
        options.common.num_workers = connections;
        let peers = PeersAdapter::open(options);
        let unverified = RespAdapter::open(
            "resp",
            &RespOptions {
                num_workers: connections,
                companion_sums: false,
                trust_missing_layout: true,
                ..RespOptions::new(Address::Tcp("127.0.0.1".to_owned(), number))
            },
        );
        drop(within);
        // Connections are made meanwhile.
        while ours
            .block_on(peers.lookup(objects.clone()))
            .unwrap()
            .iter()
            .any(Option::is_none)
        {}
        let to: Vec<_> = objects.iter().map(|it| memory.buffer(it.len)).collect();
        let all = || items(&objects, &to);
        let mut figures = vec![Vec::new(); 3];
        for _ in 0..ROUNDS {
            figures[0].push(plain(connections as u64));
            figures[1].push(timed(|| {
                let loaded = ours.block_on(unverified.load(all()));
                assert!(loaded.iter().all(Result::is_ok));
            }));
            figures[2].push(timed(|| {
                let loaded = ours.block_on(peers.load(all()));
                for loaded in loaded {
                    assert!(loaded.unwrap().verified);
                }
            }));
        }
        let names = ["plain TCP", "GET alone", "peers, verified"];
        let speed = |of: &[(f64, f64)]| median(of.iter().map(|it| it.0).collect());
        let cpu = |of: &[(f64, f64)]| median(of.iter().map(|it| it.1).collect());
        for (name, of) in names.into_iter().zip(&figures) {
            println!(
                "{connections:11}  {name:15} {:5.2}   {:8.2}  {:25.3}  {:8.2}",
                speed(of),
                speed(of) / speed(&figures[0]),
                cpu(of),
                cpu(of) / cpu(&figures[0]),
            );
        }
        let to: Vec<_> = small.iter().map(|it| memory.buffer(it.len)).collect();
        let once = || {
            let began = Instant::now();
            let found = ours.block_on(peers.lookup(small.clone())).unwrap();
            assert!(found.iter().all(Option::is_some));
            let loaded = ours.block_on(peers.load(items(&small, &to)));
            assert!(loaded.iter().all(Result::is_ok));
            began.elapsed().as_secs_f64() * 1e3
        };
        let mut times: Vec<_> = (0..500).map(|_| once()).collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{connections:11}  4 chunks of 64 KiB, looked up and loaded: p50 {:.2} ms, p99 {:.2} ms",
            times[250], times[495]
        );
    }
}

fn items(objects: &[ObjectSpec], to: &[Buffer]) -> Vec<LoadItem> {
    let item = |(object, to): (&ObjectSpec, &Buffer)| LoadItem {
        object: object.clone(),
        to: to.clone(),
    };
    objects.iter().zip(to).map(item).collect()
}
