use peerway::*;
use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let pin: Pin = args[1].parse().unwrap();
    if args.get(2).map(|s| s.as_str()) == Some("serve") {
        let ep = Endpoint::builder().transport(pin).build().unwrap();
        let len = 512usize << 20;
        let r = if args.get(3).map(|s| s.as_str()) == Some("private") {
            ep.register(vec![1u8; len]).unwrap()
        } else {
            let r = ep.allocate(len).unwrap();
            r.fill(0, len as u64, 1).unwrap();
            r
        };
        let hex = |b: &[u8]| b.iter().map(|x| format!("{x:02x}")).collect::<String>();
        println!("{}", hex(&ep.metadata()));
        println!("{}", hex(&r.advertise(Access::READ_WRITE).unwrap()));
        let mut s = String::new();
        std::io::stdin().read_line(&mut s).unwrap();
        return;
    }
    let private = if pin == Pin::LocalMap { "shared" } else { "private" };
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .arg(&args[1])
        .arg("serve")
        .arg(private)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    use std::io::BufRead;
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = || {
        let mut s = String::new();
        out.read_line(&mut s).unwrap();
        (0..s.trim().len() / 2)
            .map(|i| u8::from_str_radix(&s[2 * i..2 * i + 2], 16).unwrap())
            .collect::<Vec<u8>>()
    };
    let md = line();
    let desc = line();
    let ep = Endpoint::builder().transport(pin).build().unwrap();
    let t = Instant::now();
    let peer = ep.connect(&md).unwrap();
    println!("connect {:?} path {}", t.elapsed(), peer.path());
    let remote = peer.import(&desc).unwrap();
    let local = ep.register(vec![7u8; 512 << 20]).unwrap();
    for op in ["write", "read"] {
        let only: Option<u64> = std::env::var("SIZE").ok().and_then(|s| s.parse().ok());
        for size in [256u64, 4096, 65536, 1 << 20, 16 << 20, 100 << 20] {
            if only.is_some_and(|o| o != size) {
                continue;
            }
            let b = if op == "write" {
                Batch::write(&local.slice(0..size), &remote.slice(0..size)).unwrap()
            } else {
                Batch::read(&local.slice(0..size), &remote.slice(0..size)).unwrap()
            };
            let p = peer.prepare(b).unwrap();
            let n = (1u64 << 30).min(size * 20000) / size;
            let n = n.clamp(8, 20000)
                * std::env::var("MUL").ok().and_then(|s| s.parse::<u64>().ok()).unwrap_or(1);
            let mut v: Vec<f64> = (0..n)
                .map(|_| {
                    let t = Instant::now();
                    p.run().unwrap().ok().unwrap();
                    t.elapsed().as_secs_f64() * 1e6
                })
                .collect();
            v.sort_by(|a, b| a.total_cmp(b));
            let p50 = v[v.len() / 2];
            println!(
                "{pin} {op} {size}: p50 {p50:.2} us p99 {:.2} us {:.2} GB/s",
                v[v.len() * 99 / 100],
                size as f64 / p50 / 1e3
            );
        }
        if only.is_some() {
            continue;
        }
        let (c, blk) = (128u64, 4096u64);
        let pairs: Vec<_> = (0..c)
            .map(|i| {
                (local.slice(i * 8192..i * 8192 + blk), remote.slice(i * 8192..i * 8192 + blk))
            })
            .collect();
        let b = if op == "write" {
            Batch::write_vector(&pairs).unwrap()
        } else {
            Batch::read_vector(&pairs).unwrap()
        };
        let p = peer.prepare(b).unwrap();
        let mut v: Vec<f64> = (0..2000)
            .map(|_| {
                let t = Instant::now();
                p.run().unwrap().ok().unwrap();
                t.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        v.sort_by(|a, b| a.total_cmp(b));
        println!(
            "{pin} {op} 128x4K: p50 {:.2} us {:.2} GB/s",
            v[1000],
            (c * blk) as f64 / v[1000] / 1e3
        );
        let n = 100_000u32;
        let idx: Vec<u32> = (0..n).map(|i| (i as u64 * 70001 % n as u64) as u32).collect();
        let idy: Vec<u32> = (0..n).map(|i| (i as u64 * 30011 % n as u64) as u32).collect();
        let (lb, rb) = (local.blocks(0, 4096, 4096, &idx), remote.blocks(0, 4096, 4096, &idy));
        let b = if op == "write" {
            Batch::write_blocks(lb, rb).unwrap()
        } else {
            Batch::read_blocks(lb, rb).unwrap()
        };
        let p = peer.prepare(b).unwrap();
        let mut v: Vec<f64> = (0..8)
            .map(|_| {
                let t = Instant::now();
                p.run().unwrap().ok().unwrap();
                t.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        v.sort_by(|a, b| a.total_cmp(b));
        println!("{pin} {op} 100000x4K: p50 {:.2} us {:.2} GB/s", v[4], 409.6e6 / v[4] / 1e3);
        let t = Instant::now();
        let tr = p.post().unwrap();
        let d = t.elapsed();
        tr.join().ok().unwrap();
        println!("  post {d:?}");
    }
    let _ = child.kill();
}
