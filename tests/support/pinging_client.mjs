// The same as pinging_client.py in Node: node pinging_client.mjs ADDRESS TOKEN METHOD WAIT_S [DIRECTORY]
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

const ROOT = join(dirname(fileURLToPath(import.meta.url)), "..", "..");
const require = createRequire(join(ROOT, "clients", "node", "client.mjs"));
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [address, token, method, waitS, directory] = process.argv.slice(2);
const loaded = grpc.loadPackageDefinition(
  protoLoader.loadSync(
    ["lorikeet/inference/v1/inference_service.proto", "lorikeet/adapters/v1/adapter_service.proto"],
    { includeDirs: [join(ROOT, "protos")], keepCase: true, enums: String, defaults: true },
  ),
).lorikeet;
const channelOptions = {
  "grpc.keepalive_time_ms": 10_000,
  "grpc.keepalive_timeout_ms": 5_000,
  "grpc.keepalive_permit_without_calls": 1,
};
const credentials = grpc.credentials.createInsecure();
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${token}`);

async function generate(client) {
  const request = { token_ids: { ids: [5] }, sampling: { temperature: 0, max_tokens: 2 } };
  const ids = [];
  for await (const piece of client.Generate(request, metadata, { deadline: Date.now() + 250_000 })) {
    ids.push(...piece.tokens.map((token) => token.id));
  }
  return ids;
}

function unary(client, name, request) {
  return new Promise((resolve, reject) => {
    client[name](request, metadata, { deadline: Date.now() + 250_000 }, (error, reply) =>
      error ? reject(error) : resolve(reply),
    );
  });
}

async function list(client) {
  return (await unary(client, "ListAdapters", { parent: "tenants/demo" })).adapters.map((a) => a.name).sort();
}

function upload(client) {
  return new Promise((resolve, reject) => {
    const call = client.Upload(metadata, { deadline: Date.now() + 250_000 }, (error, reply) =>
      error ? reject(error) : resolve(reply.revision.report.tensors_total),
    );
    const files = readdirSync(directory).map((name) => ({ name, data: readFileSync(join(directory, name)) }));
    const heads = files.map(({ name, data }) => ({
      name,
      size_bytes: data.length,
      sha256: createHash("sha256").update(data).digest("hex"),
    }));
    call.write({ header: { adapter: "demo/slow", validate_only: true, files: heads } });
    setTimeout(() => {
      for (const { name, data } of files) {
        call.write({ chunk: { file_name: name, offset: 0, data } });
      }
      call.end();
    }, Number(waitS) * 1000);
  });
}

const METHODS = { generate, list, upload };
const Service = method === "generate" ? loaded.inference.v1.InferenceService : loaded.adapters.v1.AdapterService;
const client = new Service(address, credentials, channelOptions);
try {
  console.log(JSON.stringify(await METHODS[method](client)));
  if (Number(waitS) && method !== "upload") {
    await sleep(Number(waitS) * 1000);
    console.log(JSON.stringify(await METHODS[method](client)));
  }
} catch (error) {
  console.error(`error: ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
